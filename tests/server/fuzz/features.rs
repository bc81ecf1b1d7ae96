//! Pictures over HTTP: beside token ids, with sizes, hashes and placeholders that may be those of others, and as files
//! in chats.

use base64::Engine as _;
use base64::prelude::BASE64_STANDARD;
use serde_json::{Value, json};
use sha2::{Digest as _, Sha256};

use super::dice::Dice;
use super::http::{check, request_of};
use super::picture::{file_of, files};
use super::server::Server;

const CASES: u64 = 240;
const FLAGS: &[&str] = &["--limit-mm-per-prompt", "image=2", "--max-image-tokens", "16"];
/// Pixels of the side of a token of the fixture, and the token that stands for images.
const SIDE: u32 = 28;
const IMAGE_TOKEN: u32 = 514;

/// A picture as `features` has it: its base64, its hash, and the tokens that it takes.
struct Sent {
    text: String,
    hash: String,
    tokens: usize,
}

fn sent(dice: &mut Dice) -> Sent {
    let [mut rows, mut columns] = [0, 1].map(|_| 1 + dice.below(3) as u32);
    let tokens = (rows * columns) as usize;
    let rgb: Vec<u8> = (0..3 * tokens as u32 * SIDE * SIDE).map(|byte| (byte / 7) as u8).collect();
    let mut tiles = 1;
    if dice.is_hostile() {
        tiles = dice.u32();
        (rows, columns) = (dice.u32(), dice.below(300) as u32);
    }
    let sizes = [tiles, columns.wrapping_mul(SIDE), rows.wrapping_mul(SIDE)].map(u32::to_le_bytes);
    let mut bytes = [sizes.as_flattened(), &rgb].concat();
    if dice.is_hostile() {
        bytes.truncate(dice.below(bytes.len()));
    }
    let mut text = BASE64_STANDARD.encode(&bytes);
    if dice.is_hostile() {
        text.insert_str(dice.below(text.len() + 1), dice.pick(&["=", "\0", "%", "\u{1f680}", "AAA"]));
    }
    Sent { text, hash: format!("{:x}", Sha256::digest(&bytes)), tokens }
}

/// A body of `/inference/v1/generate` with `features`.
fn with_features(dice: &mut Dice) -> Value {
    let pictures: Vec<Sent> = (0..dice.below(4)).map(|_| sent(dice)).collect();
    let mut ids: Vec<u32> = (20..20 + dice.below(6) as u32).collect();
    let mut placeholders = Vec::new();
    for Sent { tokens, .. } in &pictures {
        let mut length = *tokens;
        if dice.is_hostile() {
            length = dice.below(12);
        }
        placeholders.push(json!({ "offset": ids.len(), "length": length }));
        ids.extend(vec![IMAGE_TOKEN; length]);
        ids.extend(vec![30; dice.below(3)]);
    }
    ids.push(31);
    let mut hashes: Vec<Value> = pictures.iter().map(|picture| picture.hash.clone().into()).collect();
    let mut texts: Vec<Value> = pictures.into_iter().map(|picture| picture.text.into()).collect();
    if dice.is_hostile() && !placeholders.is_empty() {
        let at = dice.below(placeholders.len());
        placeholders[at][dice.pick(&["offset", "length"])] = dice.u64().into();
    }
    for list in [&mut hashes, &mut texts, &mut placeholders] {
        match (dice.is_hostile(), list.len()) {
            (false, _) | (_, 0) => {}
            (_, 1) => list.clear(),
            (_, length) if dice.coin() => list.swap(0, length - 1),
            (_, length) => {
                list[dice.below(length)] = [json!(null), json!("a"), json!({}), json!(3)][dice.below(4)].clone();
            }
        }
    }
    json!({
        "token_ids": ids,
        "features": {
            "mm_hashes": { "image": hashes },
            "mm_placeholders": { "image": placeholders },
            "kwargs_data": if dice.one_in(20) { json!(null) } else { json!({ "image": texts }) },
            "mm_metadata": null,
        },
        "sampling_params": { "max_tokens": 2 },
    })
}

/// A body with files: beside token ids, or in a chat.
fn with_files(dice: &mut Dice, files: &[Vec<u8>], is_chat: bool) -> Value {
    let count = 1 + dice.below(2);
    let url = |dice: &mut Dice| {
        let kind = dice.name(&["png", "jpeg", "png;charset=utf-8"]);
        format!("data:image/{kind};base64,{}", BASE64_STANDARD.encode(file_of(dice, files)))
    };
    let urls: Vec<String> = (0..count).map(|_| url(dice)).collect();
    if is_chat {
        let part = |url: String| json!({ "type": "image_url", "image_url": { "url": url, "detail": "low" } });
        let mut parts: Vec<Value> = urls.into_iter().map(part).collect();
        parts.push(json!({ "type": "text", "text": dice.text() }));
        return json!({ "messages": [{ "role": "user", "content": parts }], "max_tokens": 2 });
    }
    let ids = vec![IMAGE_TOKEN; count];
    let parts: Vec<Value> = urls.into_iter().map(|url| json!({ "type": "image_url", "url": url })).collect();
    json!({ "token_ids": ids, "content_parts": parts, "sampling_params": { "max_tokens": 2 } })
}

#[tokio::test]
async fn pictures_over_http() {
    let server = Server::of_model("qwen2_5_vl", FLAGS).await;
    let files = files();
    let request = |dice: &mut Dice| {
        let (path, body) = match dice.below(5) {
            0..=2 => ("/inference/v1/generate", with_features(dice)),
            3 => ("/inference/v1/generate", with_files(dice, &files, false)),
            _ => {
                let path = dice.pick(&["/v1/chat/completions", "/v1/chat/completions/render", "/tokenize"]);
                (path, with_files(dice, &files, true))
            }
        };
        request_of(dice, "POST", path, body.to_string().into_bytes())
    };
    check("pictures_over_http", CASES, server, request).await;
}
