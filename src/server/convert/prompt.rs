//! Prompts of requests: token ids are checked, texts and chats are encoded.

use std::sync::Arc;

use super::{
    MAX_SAMPLES_PER_REQUEST, ModelFacts, chat, check_ids, check_logprob_token_ids, check_most, encoder, images, pb,
    routing,
};
use crate::error::{Error, Result};
use crate::memory::Charge;
use crate::types::{Prompt, TokenId};

/// Checks the prompts of a `GenerateRequest`. Each must leave room for at least one token in the context.
pub(super) fn prompts(prompts: Vec<pb::Prompt>, model: &ModelFacts, charge: &mut Charge) -> Result<Vec<Prompt>> {
    ensure!(!prompts.is_empty(), "prompts", "is empty; give at least one prompt");
    prompts.into_iter().enumerate().map(|(i, p)| prompt(&format!("prompts[{i}]"), p, model, charge)).collect()
}

/// Checks the sequences of a `ScoreRequest`. Each must fit into the context. `rows` are the `logprob_token_ids` of
/// each, `images` the images, `routing` the experts.
pub(super) fn sequences(
    sequences: Vec<pb::TokenIds>,
    (rows, images, routing): (Vec<pb::TokenRows>, Vec<pb::ImageList>, Vec<pb::Routing>),
    model: &ModelFacts,
    charge: &mut Charge,
) -> Result<Vec<Prompt>> {
    ensure!(!sequences.is_empty(), "sequences", "is empty; give at least one sequence");
    check_most("sequences", sequences.len(), "sequences", MAX_SAMPLES_PER_REQUEST, "split the request")?;
    let (given, wanted) = (rows.len(), sequences.len());
    let is_complete = given == 0 || given == wanted;
    ensure!(is_complete, "logprob_token_ids", "{given} for {wanted} sequences; give one for each, or none");
    let (given, is_complete) = (images.len(), images.is_empty() || images.len() == wanted);
    ensure!(is_complete, "images", "{given} lists for {wanted} sequences; give one for each, or none");
    let (given, is_complete) = (routing.len(), routing.is_empty() || routing.len() == wanted);
    ensure!(is_complete, "routing", "{given} for {wanted} sequences; give one for each, or none");
    let (mut rows, mut images, mut routing) = (rows.into_iter(), images.into_iter(), routing.into_iter());
    let check = |(i, s): (usize, pb::TokenIds)| {
        let path = format!("sequences[{i}]");
        check_tokens(&path, &s.ids, model)?;
        let images = images::given(&format!("images[{i}].images"), images.next().unwrap_or_default().images);
        let prompt = images::place(&path, s.ids, images, model, charge)?;
        let (n, most) = (prompt.tokens.len(), model.max_model_len);
        ensure!(n <= most, path, "{n} tokens are more than the context of {most}");
        let named = rows.next().unwrap_or_default().rows;
        let logprob_token_ids = named_rows(&format!("logprob_token_ids[{i}].rows"), named, n, model)?;
        let experts = routing.next().unwrap_or_default();
        let routing = routing::forced(&format!("routing[{i}]"), experts, n, model)?;
        Ok(Prompt { logprob_token_ids, routing, ..prompt })
    };
    sequences.into_iter().enumerate().map(check).collect()
}

/// A prompt that need not fit into the context.
pub(in crate::server) fn unlimited(mut prompt: pb::Prompt, model: &ModelFacts, charge: &mut Charge) -> Result<Prompt> {
    let path = "prompts[0]";
    let images = take_images(path, &mut prompt, model, charge)?;
    let (path, ids) = encoded(path, prompt, model, usize::MAX, charge)?;
    // A text may have placeholders without images.
    if images.is_empty() { Ok(Prompt::from_tokens(ids)) } else { images::place(&path, ids, images, model, charge) }
}

/// The path of a prompt's content, and its token ids. A text that certainly has more than `most` is rejected.
fn encoded(
    path: &str,
    prompt: pb::Prompt,
    model: &ModelFacts,
    most: usize,
    charge: &mut Charge,
) -> Result<(String, Vec<TokenId>)> {
    use pb::prompt::Kind;
    const NO_TEXTS: &str = "give token ids";
    let special = prompt.add_special_tokens;
    let (path, ids) = match prompt.kind {
        None => return Err(Error::invalid(path, "none of tokens, text and chat is set")),
        Some(Kind::Tokens(tokens)) => return Ok((format!("{path}.tokens"), tokens.ids)),
        Some(Kind::Text(text)) => {
            let path = format!("{path}.text");
            let ids =
                encoder(&path, model, NO_TEXTS)?.encode_text(&path, &text, special.unwrap_or(true), most, charge)?;
            (path, ids)
        }
        Some(Kind::Chat(mut chat)) => {
            let path = format!("{path}.chat");
            let encoder = encoder(&path, model, NO_TEXTS)?;
            let own_template = Some(std::mem::take(&mut chat.chat_template)).filter(|source| !source.is_empty());
            let compiling = |source: &String| encoder.compiling_bytes(&format!("{path}.chat_template"), source);
            let bytes = chat::rendering_bytes(&chat) + own_template.as_ref().map_or(Ok(0), compiling)?;
            let traffic = charge.traffic().clone();
            let takes_images = model.images.is_some();
            let render =
                || encoder.render(&path, own_template, chat::conversation(&path, chat, takes_images)?, &traffic);
            // What was made for the text is counted until it is encoded.
            let (text, _rendered) = charge.hold(bytes, render)??;
            let ids = encoder.encode_text(&path, &text, special.unwrap_or(false), most, charge)?;
            (path, ids)
        }
    };
    charge.grow(size_of_val(&ids[..]) as u64)?;
    Ok((path, ids))
}

fn prompt(path: &str, mut prompt: pb::Prompt, model: &ModelFacts, charge: &mut Charge) -> Result<Prompt> {
    let (named, rows_path) = (std::mem::take(&mut prompt.logprob_token_ids), format!("{path}.logprob_token_ids"));
    let (experts, routing_path) = (prompt.routing.take(), format!("{path}.routing"));
    let (kept, keep_first) = (prompt.keep_tokens.map(|kept| kept as usize), prompt.keep_first);
    let images = take_images(path, &mut prompt, model, charge)?;
    if let Some(image) = images.first().filter(|_| kept.is_some()) {
        return Err(Error::invalid(&image.path, "a prompt with images cannot be cut; leave keep_tokens unset"));
    }
    let is_cut = kept.is_some() && experts.is_some();
    ensure!(!is_cut, routing_path, "a prompt with routing cannot be cut; leave keep_tokens unset");
    // A text that is cut may be longer than the context.
    let most = if kept.is_some() { usize::MAX } else { model.max_model_len };
    ensure!(kept != Some(0), format!("{path}.keep_tokens"), "0 tokens; keep at least 1");
    let (path, mut ids) = encoded(path, prompt, model, most, charge)?;
    match kept {
        Some(kept) if keep_first => ids.truncate(kept),
        Some(kept) => drop(ids.drain(..ids.len().saturating_sub(kept))),
        None => {}
    }
    check_tokens(&path, &ids, model)?;
    let prompt = images::place(&path, ids, images, model, charge)?;
    let (n, most) = (prompt.tokens.len(), model.max_model_len);
    ensure!(n < most, path, "{n} tokens leave no room for one more in the context of {most}; shorten the prompt");
    let logprob_token_ids = named_rows(&rows_path, named, n, model)?;
    let routing = routing::forced(&routing_path, experts.unwrap_or_default(), n, model)?;
    Ok(Prompt { logprob_token_ids, routing, ..prompt })
}

/// Takes the images of a prompt: those of its field, and those that the messages of a chat hold, which become parts of
/// the type `image`.
///
/// # Errors
/// `InvalidArgument` for a part of the messages.
fn take_images(
    path: &str,
    prompt: &mut pb::Prompt,
    model: &ModelFacts,
    charge: &mut Charge,
) -> Result<Vec<images::GivenImage>> {
    let images = images::given(&format!("{path}.images"), std::mem::take(&mut prompt.images));
    match &mut prompt.kind {
        Some(pb::prompt::Kind::Chat(chat)) if model.images.is_some() => {
            chat::take_images(&format!("{path}.chat"), chat, images, charge)
        }
        _ => Ok(images),
    }
}

/// Checks the rows of tokens to report beside the last ones of a prompt of `n` tokens.
fn named_rows(path: &str, rows: Vec<pb::TokenIds>, n: usize, model: &ModelFacts) -> Result<Arc<[Vec<TokenId>]>> {
    let count = rows.len();
    ensure!(count < n.max(1), path, "{count} rows are more than the {} tokens after the prompt's first", n - 1);
    let check = |(i, row): (usize, pb::TokenIds)| {
        check_logprob_token_ids(format_args!("{path}[{i}].ids"), &row.ids, model)?;
        Ok(row.ids)
    };
    rows.into_iter().enumerate().map(check).collect()
}

/// Checks that there are token ids, all of them below the vocabulary size.
fn check_tokens(path: &str, ids: &[TokenId], model: &ModelFacts) -> Result<()> {
    ensure!(!ids.is_empty(), path, "is empty; give at least one token");
    check_ids(format_args!("{path}.ids"), ids, model)
}
