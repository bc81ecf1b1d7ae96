//! Cases of the service Rollout: Generate, Score and Abort.

use std::collections::HashMap;

use bytes::Bytes;
use prost::Message as _;
use rollout_server::server::pb::{self, generate_response::Event, prompt::Kind};
use tonic::Code;

use super::control::{call, target};
use super::dice::Dice;
use super::returns;
use super::run::Case;
use super::sampling::{self, CONTEXT, VOCABULARY, tokens};
use super::wire::{Call, Leave};

const GENERATE: &str = "rollout.v1.Rollout/Generate";
const SCORE: &str = "rollout.v1.Rollout/Score";
const IDS: &[&str] = &["", "", "", "a", "b", "c", "d"];
/// Tokens that a case may make. The client ends a case early that could make more.
const MOST_TOKENS: u64 = 1_500;

pub fn adapter(dice: &mut Dice) -> String {
    if dice.one_in(15) { dice.name(&["student", "teacher", "nobody"]) } else { String::new() }
}

/// JSON of every kind that a field of a chat takes, and some that none takes.
const CHAT_JSON: &[&str] = &[
    "[]",
    "null",
    "{}",
    "[1, \"a\", {}]",
    r#"[{"role": "user", "content": [{"type": "text", "text": "Hi"}, "there"]}]"#,
    r#"[{"role": "assistant", "content": null, "tool_calls": [{"function": {"name": "f", "arguments": "{\"a\": [1]}"}}]}]"#,
    r#"[{"role": "tool", "content": "3", "tool_call_id": "c"}, {"role": "user", "content": "So?"}]"#,
    r#"[{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "data:,"}}]}]"#,
    r#"[{"type": "function", "function": {"name": "f", "parameters": {"type": "object"}}}]"#,
    r#"{"enable_thinking": false, "messages": 3}"#,
    r#"{"a": {"b": [1e308, -0.0, 18446744073709551616]}}"#,
];

fn chat_json(dice: &mut Dice) -> String {
    if dice.is_hostile() {
        let part = dice.pick(&["[", "{\"a\":", "[{},", "\"", "1e999", "\\u0000"]);
        return part.repeat(dice.pick(&[1, 200, 20_000]));
    }
    if dice.coin() { String::new() } else { dice.pick(CHAT_JSON).into() }
}

fn chat(dice: &mut Dice) -> pb::Chat {
    let message =
        |dice: &mut Dice| pb::ChatMessage { role: dice.name(&["user", "system", "assistant"]), content: dice.text() };
    let is_plain = dice.coin();
    pb::Chat {
        messages: if is_plain { dice.list(3, message) } else { Vec::new() },
        messages_json: if is_plain { String::new() } else { chat_json(dice) },
        tools_json: chat_json(dice),
        documents_json: chat_json(dice),
        template_arguments_json: chat_json(dice),
        add_generation_prompt: dice.maybe(Dice::coin),
        continue_final_message: dice.one_in(4),
        chat_template: if dice.is_hostile() && dice.one_in(4) { dice.text() } else { String::new() },
    }
}

fn prompt(dice: &mut Dice) -> pb::Prompt {
    let kind = match dice.below(8) {
        0 if dice.is_hostile() => None,
        1 => Some(Kind::Text(dice.text())),
        2 => Some(Kind::Chat(chat(dice))),
        3 => Some(Kind::Tokens(tokens(dice, CONTEXT - 1))),
        _ => Some(Kind::Tokens(tokens(dice, 40))),
    };
    let sampling = if dice.one_in(6) { Some(Box::new(sampling::params(dice))) } else { None };
    let keep_tokens = if dice.one_in(4) { Some(dice.between(1, 9)) } else { None };
    let logprob_token_ids = if dice.one_in(6) { token_rows(dice) } else { Vec::new() };
    let (add_special_tokens, keep_first) = (dice.maybe(Dice::coin), dice.coin());
    let images = if dice.one_in(12) { (0..dice.below(4)).map(|_| image(dice)).collect() } else { Vec::new() };
    // The model has no experts.
    let routing = if dice.is_hostile() && dice.one_in(12) { Some(routing(dice)) } else { None };
    pb::Prompt { kind, add_special_tokens, sampling, keep_tokens, keep_first, logprob_token_ids, images, routing }
}

fn routing(dice: &mut Dice) -> pb::Routing {
    let experts = (0..dice.below(40)).map(|_| dice.below(256) as u8).collect();
    pb::Routing { first_token: dice.between(0, 9), layers: dice.between(0, 9), top_k: dice.between(0, 9), experts }
}

fn image(dice: &mut Dice) -> pb::Image {
    let [width, height] = [0, 1].map(|_| if dice.one_in(8) { u32::MAX } else { 28 * dice.below(4) as u32 });
    // A sender may declare far more than it sends.
    let bytes = if dice.coin() { 3 * width.min(84) * height.min(84) } else { dice.below(3001) as u32 };
    let rgb = vec![7; bytes as usize];
    let source = match dice.one_in(4) {
        true => pb::image::Source::Encoded(dice.text().into_bytes()),
        false => {
            let tiles = dice.maybe(|dice| dice.below(4) as u32);
            pb::image::Source::Pixels(pb::Pixels { width, height, rgb, tiles })
        }
    };
    pb::Image { source: (!dice.one_in(8)).then_some(source) }
}

/// Tokens to report beside the last ones of a prompt.
fn token_rows(dice: &mut Dice) -> Vec<pb::TokenIds> {
    (0..dice.below(6)).map(|_| if dice.coin() { tokens(dice, 5) } else { pb::TokenIds::default() }).collect()
}

fn prompts(dice: &mut Dice) -> Vec<pb::Prompt> {
    match dice.below(10) {
        0 if dice.is_hostile() => Vec::new(),
        1 => vec![prompt(dice); 1 + dice.below(40)],
        _ => (0..1 + dice.below(3)).map(|_| prompt(dice)).collect(),
    }
}

fn generate_request(dice: &mut Dice) -> pb::GenerateRequest {
    let most = dice.pick(&[2, 4, 4, 4, 1024]);
    let returns = dice.one_in(3).then(|| returns::returns_of_completions(dice));
    // Both list tokens, and exclude `top`.
    let lists = dice.is_hostile() || returns.as_ref().is_none_or(|returns| returns.top == 0);
    pb::GenerateRequest {
        returns,
        request_id: dice.name(IDS),
        prompts: prompts(dice),
        n: dice.maybe(|dice| dice.between(1, most)),
        sampling: dice.maybe(sampling::params),
        top_logprobs: if lists && dice.coin() { dice.between(0, 100) } else { 0 },
        prompt_logprobs: dice.coin(),
        return_text: dice.coin(),
        stream_tokens: dice.coin(),
        adapter: adapter(dice),
        if_weight_version: if dice.one_in(8) { dice.maybe(Dice::u64) } else { None },
        min_weight_version: if dice.one_in(8) { dice.maybe(Dice::u64) } else { None },
        time_limit_seconds: if dice.one_in(8) { Some(time_limit(dice)) } else { None },
        logprob_token_ids: if lists && dice.one_in(4) { tokens(dice, 9).ids } else { Vec::new() },
        return_routing: dice.is_hostile() && dice.one_in(8),
        top_logprobs_of: if dice.is_hostile() { dice.below(5) as i32 - 1 } else { dice.below(3) as i32 },
        tenant: tenant(dice),
    }
}

/// Names of tenants, which every client may use without a token file.
fn tenant(dice: &mut Dice) -> String {
    const WRONG: &[&str] =
        &["two words", "\u{e9}", "\u{0}", "a name that is much longer than the names of tenants may be at most"];
    (if dice.is_hostile() { dice.pick(WRONG) } else { dice.pick(&["", "", "a", "b"]) }).into()
}

fn time_limit(dice: &mut Dice) -> f64 {
    const WRONG: &[f64] = &[f64::NAN, f64::NEG_INFINITY, -1.0, -f64::MIN_POSITIVE];
    const LIMITS: &[f64] = &[0.0, -0.0, 1e-9, 0.001, 0.03, 1e9, 1e300, f64::INFINITY];
    if dice.is_hostile() { dice.pick(WRONG) } else { dice.pick(LIMITS) }
}

fn most_tokens(request: &pb::GenerateRequest) -> u64 {
    let each = |prompt| sampling_of(request, prompt).and_then(|s| s.max_tokens).unwrap_or(16).min(CONTEXT);
    request.prompts.iter().map(|prompt| u64::from(request.n.unwrap_or(1)) * u64::from(each(prompt))).sum()
}

/// How a prompt is sampled.
fn sampling_of<'a>(request: &'a pb::GenerateRequest, prompt: &'a pb::Prompt) -> Option<&'a pb::SamplingParams> {
    prompt.sampling.as_deref().or(request.sampling.as_ref())
}

pub fn generate(dice: &mut Dice) -> Call {
    let request = generate_request(dice);
    let mut call = call(dice, GENERATE, &request);
    if most_tokens(&request) > MOST_TOKENS && call.leave == Leave::Never {
        call.leave = Leave::AfterMessages(1 + dice.below(8));
        call.timeout = Some(dice.pick(&["1m", "30m", "120m"]).into());
    }
    if request.min_weight_version.is_some() {
        call.timeout.get_or_insert_with(|| "60m".into());
    }
    call.checked(move |messages| check_generate(&request, messages))
}

/// A request that runs for a moment, so that other calls meet it.
pub fn small_generate(dice: &mut Dice) -> Call {
    let max_tokens = Some(dice.pick(&[1, 20, 150]));
    let request = pb::GenerateRequest {
        request_id: dice.name(IDS),
        prompts: (0..1 + dice.below(2))
            .map(|_| pb::Prompt { kind: Some(Kind::Tokens(tokens(dice, 60))), ..Default::default() })
            .collect(),
        n: Some(1 + dice.below(4) as u32),
        sampling: Some(pb::SamplingParams { max_tokens, min_tokens: None, ..sampling::params(dice) }),
        adapter: adapter(dice),
        stream_tokens: dice.coin(),
        prompt_logprobs: dice.coin(),
        ..Default::default()
    };
    let mut call = Call::of(GENERATE, &request);
    call.timeout = Some(dice.pick(&["2m", "30m", "120m"]).into());
    if dice.one_in(3) {
        call.leave = Leave::AfterMessages(1);
    }
    call.checked(move |messages| check_generate(&request, messages))
}

/// Checks an answer of Generate that ended with OK: one completion for each sample, then one summary; no value is NaN
/// where none may be.
fn check_generate(request: &pb::GenerateRequest, messages: &[Bytes]) -> Result<(), String> {
    let mut expected = request.prompts.len() * request.n.unwrap_or(1) as usize;
    let (mut summaries, mut prompts) = (0, Vec::new());
    for (at, message) in messages.iter().enumerate() {
        let message = pb::GenerateResponse::decode(message.clone()).map_err(|e| format!("message {at}: {e}"))?;
        match message.event.ok_or("an empty message")? {
            Event::Completion(completion) => {
                expected = expected.checked_sub(1).ok_or("more completions than samples")?;
                check_completion(request, &completion).map_err(|why| format!("{why}: {completion:?}"))?;
            }
            Event::PromptLogprobs(prompt) => {
                check_prompt_logprobs(request, &prompt).map_err(|why| format!("{why}: {prompt:?}"))?;
            }
            Event::Delta(delta) => {
                let tokens = delta.token_ids.len();
                check_logprobs(&delta.raw_logprobs)
                    .and_then(|()| match tokens {
                        0 => Ok(()),
                        _ => returns::check(request.returns.as_ref(), delta.returned.as_ref(), tokens, 0),
                    })
                    .map_err(|why| format!("{why}: {delta:?}"))?;
            }
            Event::Summary(_) => summaries += 1,
            Event::PromptRouting(_) => return Err("a dense model has no experts".into()),
            Event::Prompt(prompt) => {
                check_prompt(request, &prompt).map_err(|why| format!("{why}: {prompt:?}"))?;
                prompts.push(prompt.prompt_index);
            }
        }
    }
    if expected > 0 || summaries != 1 {
        return Err(format!("{expected} completions are missing, and there are {summaries} summaries"));
    }
    prompts.sort_unstable();
    if prompts != (0..request.prompts.len() as u32).collect::<Vec<_>>() {
        return Err(format!("not each prompt was sent back once: {prompts:?}"));
    }
    Ok(())
}

fn check_prompt(request: &pb::GenerateRequest, sent: &pb::PromptTokens) -> Result<(), String> {
    let prompt = request.prompts.get(sent.prompt_index as usize).ok_or("there is no such prompt")?;
    match &prompt.kind {
        Some(Kind::Tokens(tokens)) if kept(prompt, &tokens.ids) != sent.token_ids => Err("it has other tokens".into()),
        _ if sent.token_ids.is_empty() => Err("it has no tokens".into()),
        _ => Ok(()),
    }
}

/// Only tokens without a row have no log-probability, and only where nothing else asks for it.
fn check_prompt_logprobs(request: &pb::GenerateRequest, sent: &pb::PromptLogprobs) -> Result<(), String> {
    let prompt = request.prompts.get(sent.prompt_index as usize).ok_or("there is no such prompt")?;
    let (length, rows) = (sent.token_ids.len(), &prompt.logprob_token_ids);
    let first = if request.prompt_logprobs { 1 } else { length.saturating_sub(rows.len()) };
    check_logprobs(sent.raw_logprobs.get(first..).unwrap_or_default())?;
    returns::check(request.returns.as_ref(), sent.returned.as_ref(), length, first)?;
    if sent.raw_logprobs.len() != length || !rows.is_empty() && sent.token_id_logprobs.len() != length {
        return Err("not as many entries as tokens".into());
    }
    let listed = sent.token_id_logprobs.iter().rev().map(|listed| &listed.token_ids);
    match rows.iter().rev().map(|row| &row.ids).eq(listed.take(rows.len())) {
        true => sent.token_id_logprobs.iter().try_for_each(|listed| check_logprobs(&listed.logprobs)),
        false => Err("other tokens are listed than were named".into()),
    }
}

/// The tokens that are left of `ids`.
fn kept<'a>(prompt: &pb::Prompt, ids: &'a [u32]) -> &'a [u32] {
    let count = prompt.keep_tokens.map_or(ids.len(), |count| ids.len().min(count as usize));
    if prompt.keep_first { &ids[..count] } else { &ids[ids.len() - count..] }
}

fn check_completion(request: &pb::GenerateRequest, completion: &pb::Completion) -> Result<(), String> {
    let length = completion.token_ids.len();
    if completion.logprobs.len() != length || completion.raw_logprobs.len() != length {
        return Err("not as many log-probabilities as tokens".into());
    }
    if completion.finish_reason() == pb::FinishReason::Unspecified {
        return Err("it has no reason to end".into());
    }
    check_logprobs(&completion.raw_logprobs)?;
    check_logprobs(&completion.logprobs)?;
    check_policies(request, completion)?;
    returns::check(request.returns.as_ref(), completion.returned.as_ref(), length, 0)?;
    let prompt = &request.prompts[completion.prompt_index as usize];
    let allowed = sampling_of(request, prompt).map(|s| &s.allowed_token_ids).filter(|allowed| !allowed.is_empty());
    let is_allowed = |token: &u32| *token < VOCABULARY && allowed.is_none_or(|allowed| allowed.contains(token));
    if !completion.token_ids.iter().all(is_allowed) {
        return Err("a token that is not allowed".into());
    }
    let spans = &completion.weight_versions;
    let follows = |pair: &[pb::VersionSpan]| pair[0].end == pair[1].start;
    let ends = (spans.first().map_or(0, |s| s.start), spans.last().map_or(0, |s| s.end));
    if ends != (0, length as u32) || !spans.windows(2).all(follows) {
        return Err("the versions are not of all tokens".into());
    }
    Ok(())
}

/// Checks the scores under other policies: all that were asked for, or none of a completion that was cut off.
fn check_policies(request: &pb::GenerateRequest, completion: &pb::Completion) -> Result<(), String> {
    let asked = request.returns.clone().unwrap_or_default();
    let scores: Vec<_> = completion.references.iter().chain(&completion.current).collect();
    let expected = asked.references.len() + usize::from(asked.current);
    if scores.len() != expected && !scores.is_empty() {
        return Err(format!("{} scores under {expected} policies", scores.len()));
    }
    for score in scores {
        if [score.raw_logprobs.len(), score.logprobs.len()] != [completion.token_ids.len(); 2] {
            return Err("a score with other tokens".into());
        }
        let has_divergences = asked.divergences && completion.current.as_ref() != Some(score);
        let divergences = if has_divergences { completion.token_ids.len() } else { 0 };
        if [score.kl.len(), score.reverse_kl.len()] != [divergences; 2] {
            return Err("divergences of other tokens".into());
        }
        check_logprobs(&score.raw_logprobs)?;
    }
    Ok(())
}

/// Checks log-probabilities: they are finite, and at most 0 up to rounding.
fn check_logprobs(values: &[f32]) -> Result<(), String> {
    match values.iter().find(|value| !(value.is_finite() && **value <= 1e-3)) {
        Some(value) => Err(format!("{value} is no log-probability")),
        None => Ok(()),
    }
}

pub fn score(dice: &mut Dice) -> Call {
    let most = dice.pick(&[1, 3, 30]);
    let sampling = if dice.is_hostile() { sampling::params(dice) } else { sampling::distribution(dice) };
    let sequences: Vec<_> = (0..dice.between(1, most).min(100)).map(|_| tokens(dice, CONTEXT)).collect();
    let named = if dice.one_in(4) { sequences.len().saturating_sub(usize::from(dice.is_hostile())) } else { 0 };
    let returns = dice.one_in(3).then(|| returns::returns_of_scores(dice));
    let lists = dice.is_hostile() || returns.as_ref().is_none_or(|returns| returns.top == 0);
    let named = if lists { named } else { 0 };
    let request = pb::ScoreRequest {
        returns,
        logprob_token_ids: (0..named).map(|_| pb::TokenRows { rows: token_rows(dice) }).collect(),
        sequences,
        top_logprobs: if lists && dice.coin() { dice.between(0, 100) } else { 0 },
        adapter: adapter(dice),
        if_weight_version: if dice.one_in(8) { dice.maybe(Dice::u64) } else { None },
        min_weight_version: if dice.one_in(8) { dice.maybe(Dice::u64) } else { None },
        sampling: dice.coin().then_some(sampling),
        images: Vec::new(),
        return_routing: dice.is_hostile() && dice.one_in(8),
        routing: if dice.is_hostile() && dice.one_in(8) { vec![routing(dice)] } else { Vec::new() },
        tenant: tenant(dice),
    };
    let mut call = call(dice, SCORE, &request);
    if request.min_weight_version.is_some() {
        call.timeout.get_or_insert_with(|| "60m".into());
    }
    call.checked(move |messages| check_score(&request, messages))
}

fn check_score(request: &pb::ScoreRequest, messages: &[Bytes]) -> Result<(), String> {
    let mut scores: HashMap<u32, (Vec<f32>, Vec<f32>)> = HashMap::new();
    for message in messages {
        let reply = pb::ScoreResponse::decode(message.clone()).map_err(|e| e.to_string())?;
        let score = reply.score.ok_or("a message without a score")?;
        let (tokens, skipped) = (score.raw_logprobs.len(), usize::from(reply.start == 0));
        returns::check(request.returns.as_ref(), score.returned.as_ref(), tokens, skipped)?;
        let asked = request.returns.clone().unwrap_or_default();
        let policies: Vec<_> = score.references.iter().chain(&score.base).collect();
        if policies.len() != asked.references.len() + usize::from(asked.base) {
            return Err(format!("scores under {} policies", policies.len()));
        }
        let expected = [
            tokens,
            tokens,
            if asked.divergences && request.sequences[reply.sequence_index as usize].ids.len() > 1 {
                tokens
            } else {
                0
            },
        ];
        if policies.iter().any(|p| [p.raw_logprobs.len(), p.logprobs.len(), p.kl.len()] != expected) {
            return Err("a score under another policy with other tokens".into());
        }
        let (raw, processed) = scores.entry(reply.sequence_index).or_default();
        if raw.len() != reply.start as usize {
            return Err(format!("a part from token {} after {} tokens", reply.start, raw.len()));
        }
        raw.extend(score.raw_logprobs);
        processed.extend(score.logprobs);
    }
    if scores.len() != request.sequences.len() {
        return Err(format!("{} scores", scores.len()));
    }
    for (index, sequence) in (0..).zip(&request.sequences) {
        let (raw, processed) = scores.get(&index).ok_or_else(|| format!("no score of sequence {index}"))?;
        if raw.len() != sequence.ids.len() || processed.len() != sequence.ids.len() {
            return Err("not as many log-probabilities as tokens".into());
        }
        check_logprobs(&raw[1..])?;
        // A token that the parameters rule out has minus infinity, which is valid.
        if let Some(value) = processed[1..].iter().find(|v| v.is_nan() || **v > 1e-3) {
            return Err(format!("{value} is no log-probability"));
        }
    }
    Ok(())
}

pub fn abort(dice: &mut Dice) -> Call {
    let request = pb::AbortRequest {
        request_ids: match dice.below(6) {
            0 => Vec::new(),
            1 if dice.is_hostile() => vec!["a".into(); 100_000],
            _ => dice.list(4, |dice| dice.name(IDS)),
        },
        all: dice.one_in(3),
    };
    call(dice, "rollout.v1.Rollout/Abort", &request)
}

const GENERATE_CODES: &[Code] = &[
    Code::InvalidArgument,
    Code::DeadlineExceeded,
    Code::ResourceExhausted,
    Code::NotFound,
    Code::Aborted,
    Code::AlreadyExists,
];

#[tokio::test]
async fn generate_anything() {
    let make = |dice: &mut Dice, _: &_| generate(dice).into();
    target("generate_anything", GENERATE_CODES, 1000, make).run().await;
}

#[tokio::test]
async fn score_anything() {
    let make = |dice: &mut Dice, _: &_| score(dice).into();
    target("score_anything", GENERATE_CODES, 500, make).run().await;
}

/// Aborts beside running requests, some of which have the ids that it names.
#[tokio::test]
async fn abort_anything() {
    let make = |dice: &mut Dice, _: &_| {
        let mut calls: Vec<Call> = (0..dice.below(4)).map(|_| small_generate(dice)).collect();
        calls.extend((0..1 + dice.below(2)).map(|_| abort(dice)));
        Case::at_once(Vec::new(), calls)
    };
    target("abort_anything", GENERATE_CODES, 400, make).run().await;
}
