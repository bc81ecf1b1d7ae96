//! Events are turned into messages, and errors into statuses.

use tonic::Code;

use super::super::status::to_status;
use super::*;
use crate::memory::Traffic;
use crate::server::ModelFacts;
use crate::server::convert::{generate, score};

/// A model with a vocabulary of 100 and a context of 8, in which token 99 ends a sequence.
fn model() -> ModelFacts {
    ModelFacts { vocab_size: 100, max_model_len: 8, eos_token_ids: vec![99], ..Default::default() }
}

fn token(token: u32) -> TokenLogprobs {
    let t = token as f32;
    TokenLogprobs {
        token,
        raw: -t,
        processed: -t / 2.0,
        top: vec![(token, -t), (token + 1, -t - 1.0)],
        rank: token + 1,
        returned: None,
    }
}

fn request(top_logprobs: u32, prompt_logprobs: bool) -> ValidRequest {
    let tokens = pb::prompt::Kind::Tokens(pb::TokenIds { ids: vec![10, 11, 12] });
    let request = pb::GenerateRequest {
        request_id: "r".into(),
        prompts: vec![pb::Prompt { kind: Some(tokens), ..Default::default() }],
        top_logprobs,
        prompt_logprobs,
        ..Default::default()
    };
    generate(request, &model(), &mut Traffic::new(1 << 20).charge_always(0)).expect("valid")
}

/// The messages that the first event of a reply becomes, but for the prompt.
fn messages(request: &ValidRequest, event: Event) -> Vec<Message> {
    let mut messages = write(&mut GenerateWriter::new(request), event);
    assert_eq!(messages.remove(0), sent_back());
    messages
}

fn write(writer: &mut GenerateWriter, event: Event) -> Vec<Message> {
    let mut out = VecDeque::new();
    writer.write(event, &mut out).expect("no error");
    out.into_iter().map(|m| m.event.expect("a message has an event")).collect()
}

fn sent_back() -> Message {
    Message::Prompt(pb::PromptTokens { prompt_index: 0, token_ids: vec![10, 11, 12], images: Vec::new() })
}

fn prompt_done(prompt_index: u32, logprobs: Vec<TokenLogprobs>, weight_version: WeightVersion) -> Event {
    Event::PromptDone {
        prompt_index,
        logprobs: Some(logprobs),
        routing: Vec::new(),
        weight_version,
        scores: PolicyScores::default(),
    }
}

fn policy_score_of(logprobs: Vec<(f32, f32)>, weight_version: WeightVersion) -> PolicyScore {
    PolicyScore { logprobs, weight_version, ..PolicyScore::default() }
}

fn completion() -> Completion {
    Completion {
        prompt_index: 0,
        sample_index: 3,
        tokens: vec![token(1), token(2)],
        finish_reason: FinishReason::StopToken,
        text: None,
        weight_versions: vec![(4, 0, 1), (5, 1, 2)],
        seed: 77,
        cached_tokens: 2,
        routing: Vec::new(),
        scores: PolicyScores {
            references: vec![PolicyScore {
                logprobs: vec![(-1.5, -2.0), (-0.25, -0.5)],
                divergences: vec![Divergences { kl: 0.5, reverse_kl: 0.25 }, Divergences { kl: 0.0, reverse_kl: 1.0 }],
                weight_version: 5,
            }],
            base: Some(policy_score_of(vec![(-1.0, -1.25), (-0.5, -0.625)], 5)),
            current: Some(policy_score_of(vec![(-3.0, -3.5), (-0.75, 0.0)], 6)),
        },
    }
}

fn expected_completion() -> pb::Completion {
    pb::Completion {
        prompt_index: 0,
        sample_index: 3,
        token_ids: vec![1, 2],
        logprobs: vec![-0.5, -1.0],
        raw_logprobs: vec![-1.0, -2.0],
        top_logprobs: Vec::new(),
        finish_reason: pb::FinishReason::StopToken.into(),
        weight_versions: vec![
            pb::VersionSpan { weight_version: 4, start: 0, end: 1 },
            pb::VersionSpan { weight_version: 5, start: 1, end: 2 },
        ],
        seed: 77,
        cached_tokens: 2,
        text: None,
        ranks: Vec::new(),
        routing: None,
        returned: None,
        references: vec![pb::PolicyScore {
            weight_version: 5,
            raw_logprobs: vec![-1.5, -0.25],
            logprobs: vec![-2.0, -0.5],
            kl: vec![0.5, 0.0],
            reverse_kl: vec![0.25, 1.0],
        }],
        base: Some(pb::PolicyScore {
            weight_version: 5,
            raw_logprobs: vec![-1.0, -0.5],
            logprobs: vec![-1.25, -0.625],
            ..pb::PolicyScore::default()
        }),
        current: Some(pb::PolicyScore {
            weight_version: 6,
            raw_logprobs: vec![-3.0, -0.75],
            logprobs: vec![-3.5, 0.0],
            ..pb::PolicyScore::default()
        }),
    }
}

#[test]
fn a_prompt_is_sent_back_once_before_all_else_of_it() {
    let mut writer = GenerateWriter::new(&request(0, true));
    let logprobs = vec![token(11), token(12)];
    let first = write(&mut writer, prompt_done(0, logprobs, 0));
    assert!(matches!(&first[..], [prompt, Message::PromptLogprobs(_)] if *prompt == sent_back()), "{first:?}");
    let second = write(&mut writer, Event::Completion(completion()));
    assert!(matches!(&second[..], [Message::Completion(_)]), "{second:?}");
    let first = write(&mut GenerateWriter::new(&request(0, false)), Event::Done(Summary::default()));
    assert!(matches!(&first[..], [Message::Summary(_)]), "{first:?}");
}

#[test]
fn a_completion_arrives_whole() {
    let got = messages(&request(0, false), Event::Completion(completion()));
    assert_eq!(got, [Message::Completion(expected_completion())]);
}

#[test]
fn top_logprobs_come_only_if_asked() {
    let top = |t: f32| pb::TopLogprobs { token_ids: vec![t as u32, t as u32 + 1], logprobs: vec![-t, -t - 1.0] };
    let got = messages(&request(2, false), Event::Completion(completion()));
    let expected =
        pb::Completion { top_logprobs: vec![top(1.0), top(2.0)], ranks: vec![2, 3], ..expected_completion() };
    assert_eq!(got, [Message::Completion(expected)]);
}

#[test]
fn a_token_is_a_delta() {
    let event = Event::Token { prompt_index: 0, sample_index: 3, logprobs: token(7), text: None, is_last: false };
    let expected = pb::TokenDelta {
        prompt_index: 0,
        sample_index: 3,
        token_ids: vec![7],
        logprobs: vec![-3.5],
        raw_logprobs: vec![-7.0],
        ..Default::default()
    };
    assert_eq!(messages(&request(0, false), event.clone()), [Message::Delta(expected.clone())]);
    let top = pb::TopLogprobs { token_ids: vec![7, 8], logprobs: vec![-7.0, -8.0] };
    let expected = pb::TokenDelta { top_logprobs: vec![top], ranks: vec![8], ..expected };
    assert_eq!(messages(&request(2, false), event), [Message::Delta(expected)]);
}

#[test]
fn text_comes_with_tokens_alone_and_with_the_completion() {
    let some = |text: &str| Some(text.to_owned());
    let event = Event::Token { prompt_index: 0, sample_index: 3, logprobs: token(7), text: some("a"), is_last: false };
    let got = messages(&request(0, false), event);
    assert!(
        matches!(&got[..], [Message::Delta(delta)] if delta.token_ids == [7] && delta.text == some("a")),
        "{got:?}"
    );
    let got = messages(&request(0, false), Event::Text { prompt_index: 0, sample_index: 3, text: "b".into() });
    let rest = pb::TokenDelta { prompt_index: 0, sample_index: 3, text: some("b"), ..Default::default() };
    assert_eq!(got, [Message::Delta(rest)]);
    let got = messages(&request(0, false), Event::Completion(Completion { text: some("ab"), ..completion() }));
    assert_eq!(got, [Message::Completion(pb::Completion { text: some("ab"), ..expected_completion() })]);
}

#[test]
fn prompt_logprobs_start_with_nan() {
    let event = prompt_done(0, vec![token(11), token(12)], 0);
    let got = messages(&request(2, true), event);
    let [Message::PromptLogprobs(p)] = got.as_slice() else { panic!("{got:?}") };
    assert_eq!((p.prompt_index, p.token_ids.as_slice()), (0, [10, 11, 12].as_slice()));
    assert!(p.raw_logprobs[0].is_nan());
    assert_eq!(p.raw_logprobs[1..], [-11.0, -12.0]);
    assert_eq!(p.top_logprobs[0], pb::TopLogprobs::default());
    assert_eq!(p.top_logprobs[2].token_ids, [12, 13]);
    assert_eq!(p.ranks, [0, 12, 13]);
}

#[test]
fn named_tokens_are_listed_beside_the_last_tokens_of_a_prompt() {
    let request = |prompt_logprobs| {
        let mut request = request(0, prompt_logprobs);
        request.prompts[0].logprob_token_ids = [vec![12, 13]].into();
        request
    };
    let named = [pb::TopLogprobs::default(), pb::TopLogprobs::default(), listed(&[(12, -12.0), (13, -13.0)])];
    let unnamed = TokenLogprobs { top: Vec::new(), ..token(11) };
    for (logprobs, known) in [(vec![token(12)], false), (vec![unnamed, token(12)], true)] {
        let event = prompt_done(0, logprobs, 0);
        let got = messages(&request(known), event);
        let [Message::PromptLogprobs(p)] = got.as_slice() else { panic!("{got:?}") };
        assert_eq!(p.raw_logprobs.iter().map(|x| x.is_nan()).collect::<Vec<_>>(), [true, !known, false]);
        assert_eq!((&p.token_id_logprobs[..], p.raw_logprobs[2], p.top_logprobs.len()), (&named[..], -12.0, 0));
    }
}

#[test]
fn the_summary_ends_the_reply() {
    let summary = Summary { prompt_tokens: 3, cached_tokens: 2, completion_tokens: 8, seconds: 0.5, times: None };
    let mut out = VecDeque::new();
    let ended = GenerateWriter::new(&request(0, false)).write(Event::Done(summary.clone()), &mut out);
    assert_eq!(ended.expect("no error"), Some(summary));
    let expected = pb::GenerateSummary {
        request_id: "r".into(),
        prompt_tokens: 3,
        cached_tokens: 2,
        completion_tokens: 8,
        seconds: 0.5,
    };
    assert_eq!(out, [pb::GenerateResponse { event: Some(Message::Summary(expected)) }]);
}

fn scorer() -> ScoreWriter {
    let sequences = vec![pb::TokenIds { ids: vec![10, 11] }, pb::TokenIds { ids: vec![20] }];
    let request = pb::ScoreRequest { sequences, top_logprobs: 2, ..Default::default() };
    ScoreWriter::new(&score(request, &model(), &mut Traffic::new(1 << 20).charge_always(0)).expect("valid"))
}

fn scored(prompt_index: u32, logprobs: Vec<TokenLogprobs>) -> Event {
    prompt_done(prompt_index, logprobs, 9)
}

#[test]
fn each_sequence_s_scores_are_a_message() {
    let (mut writer, mut out) = (scorer(), VecDeque::new());
    // A sequence of one token has nothing to score, and is answered all the same.
    assert!(matches!(writer.write(scored(1, Vec::new()), &mut out), Ok(None)));
    assert!(matches!(writer.write(scored(0, vec![token(11)]), &mut out), Ok(None)));
    assert!(matches!(writer.write(Event::Done(Summary::default()), &mut out), Ok(Some(_))));
    assert_eq!(out.iter().map(|s| s.sequence_index).collect::<Vec<_>>(), [1, 0]);
    let scores: Vec<_> = out.into_iter().filter_map(|message| message.score).collect();
    assert!(scores.iter().all(|s| s.raw_logprobs[0].is_nan() && s.logprobs[0].is_nan() && s.weight_version == 9));
    assert_eq!((&scores[1].raw_logprobs[1..], &scores[1].logprobs[1..]), ([-11.0].as_slice(), [-5.5].as_slice()));
    assert_eq!(scores[1].top_logprobs[1].token_ids, [11, 12]);
    assert_eq!((scores[0].raw_logprobs.len(), scores[0].top_logprobs.len()), (1, 1));
}

#[test]
fn a_long_sequence_s_scores_are_several_messages() {
    let model = ModelFacts { max_model_len: 3000, ..model() };
    let ids: Vec<u32> = (0..2500).map(|i| i % 90).collect();
    let request = pb::ScoreRequest { sequences: vec![pb::TokenIds { ids: ids.clone() }], ..Default::default() };
    let (mut writer, mut out) = (
        ScoreWriter::new(&score(request, &model, &mut Traffic::new(1 << 20).charge_always(0)).expect("valid")),
        VecDeque::new(),
    );
    let logprobs = ids[1..].iter().map(|&id| token(id)).collect();
    assert!(matches!(writer.write(scored(0, logprobs), &mut out), Ok(None)));
    assert_eq!(out.iter().map(|s| s.start).collect::<Vec<_>>(), [0, 1024, 2048]);
    let scores: Vec<_> = out.into_iter().filter_map(|message| message.score).collect();
    let joined: Vec<f32> = scores.iter().flat_map(|s| s.raw_logprobs.iter().copied()).collect();
    assert!(joined[0].is_nan());
    assert_eq!(joined[1..], ids[1..].iter().map(|&id| token(id).raw).collect::<Vec<_>>());
}

#[test]
fn an_incomplete_score_is_aborted() {
    let (mut writer, mut out) = (scorer(), VecDeque::new());
    assert!(matches!(writer.write(scored(0, vec![token(11)]), &mut out), Ok(None)));
    let ended = writer.write(Event::Done(Summary::default()), &mut out);
    let Err(Error::Aborted(message)) = ended else { panic!("{ended:?}") };
    assert!(message.contains("1 of its 2 sequences"), "{message}");
}

#[test]
fn what_the_engine_should_not_send_is_an_internal_error() {
    let check = |events: Vec<Event>| {
        let (mut writer, mut out) = (scorer(), VecDeque::new());
        let last = events.into_iter().map(|e| writer.write(e, &mut out)).last();
        assert!(matches!(last, Some(Err(Error::Internal(_)))), "{last:?}");
    };
    check(vec![scored(2, Vec::new())]);
    check(vec![scored(0, Vec::new())]);
    check(vec![scored(1, Vec::new()), scored(1, Vec::new())]);
}

#[test]
fn every_error_has_its_status_and_keeps_its_text() {
    let check = |error: Error, code: Code| {
        let text = error.to_string();
        let status = to_status(error);
        assert_eq!((status.code(), status.message()), (code, text.as_str()));
    };
    check(Error::invalid("sampling.top_p", "2 is not a number in (0, 1]"), Code::InvalidArgument);
    check(Error::ResourceExhausted("full".into()), Code::ResourceExhausted);
    check(Error::FailedPrecondition("asleep".into()), Code::FailedPrecondition);
    check(Error::VersionConflict("version 3".into()), Code::Aborted);
    check(Error::NotFound("none".into()), Code::NotFound);
    check(Error::AlreadyExists("taken".into()), Code::AlreadyExists);
    check(Error::Unauthenticated("no token".into()), Code::Unauthenticated);
    check(Error::PermissionDenied("generate only".into()), Code::PermissionDenied);
    check(Error::Unavailable("ending".into()), Code::Unavailable);
    check(Error::Internal("bug".into()), Code::Internal);
}
