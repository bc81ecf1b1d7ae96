//! Every wrong field is refused with its path; right ones arrive as they were sent.

use std::time::Duration;

use super::super::{RequestKind, abort};
use super::{generate, model, refusal, score};
use crate::engine::AbortTarget;
use crate::server::pb;
use crate::types::{Distribution, Prompt, SamplingParams};

fn tokens(ids: &[u32]) -> pb::Prompt {
    pb::Prompt { kind: Some(pb::prompt::Kind::Tokens(pb::TokenIds { ids: ids.to_vec() })), ..Default::default() }
}

fn base() -> pb::GenerateRequest {
    pb::GenerateRequest {
        prompts: vec![tokens(&[1, 2, 3]), tokens(&[4])],
        sampling: Some(pb::SamplingParams::default()),
        ..Default::default()
    }
}

fn sampling(r: &mut pb::GenerateRequest) -> &mut pb::SamplingParams {
    r.sampling.as_mut().expect("base has it")
}

fn check(field: &str, says: &str, change: fn(&mut pb::GenerateRequest)) {
    let mut request = base();
    assert!(generate(request.clone(), &model()).is_ok(), "the base must be valid");
    change(&mut request);
    let described = format!("{request:?}");
    let (path, message) = refusal(generate(request, &model()));
    assert_eq!(path, field, "{message}: {described}");
    assert!(message.contains(says), "{path}: {message:?} does not say {says:?}");
}

#[test]
fn wrong_prompts_are_refused() {
    check("prompts", "is empty", |r| r.prompts.clear());
    check("prompts[1]", "none of", |r| r.prompts[1].kind = None);
    check("prompts[1].tokens", "is empty", |r| r.prompts[1] = tokens(&[]));
    check("prompts[0].tokens.ids[2]", "100 is not below the vocabulary size 100", |r| {
        r.prompts[0] = tokens(&[1, 99, 100]);
    });
    check("prompts[1].tokens.ids[0]", "4294967295 is not below", |r| r.prompts[1] = tokens(&[u32::MAX]));
    check("prompts[0].tokens", "8 tokens leave no room for one more in the context of 8", |r| {
        r.prompts[0] = tokens(&[1; 8]);
    });
    check("prompts[0].text", "no tokenizer", |r| {
        r.prompts[0].kind = Some(pb::prompt::Kind::Text("hello".into()));
    });
    check("prompts[0].chat", "no tokenizer", |r| {
        r.prompts[0].kind = Some(pb::prompt::Kind::Chat(pb::Chat::default()));
    });
}

#[test]
fn wrong_request_fields_are_refused() {
    check("n", "0 samples", |r| r.n = Some(0));
    check("n", "1025 is more than 1024", |r| r.n = Some(1025));
    check("n", "65 prompts x 1024 samples = 66560, more than 65536", |r| {
        r.prompts = vec![tokens(&[1]); 65];
        r.n = Some(1024);
    });
    check("top_logprobs", "101 is more than 100", |r| r.top_logprobs = 101);
    check("sampling.structured_outputs", "no tokenizer", |r| sampling(r).structured_outputs = Some(Default::default()));
    check("sampling.thinking_token_budget", "no tokenizer", |r| sampling(r).thinking_token_budget = Some(1));
    check("top_logprobs_of", "3 is not a Distribution", |r| r.top_logprobs_of = 3);
    check("return_text", "no tokenizer", |r| r.return_text = true);
    check("if_weight_version", "1 is below min_weight_version 2", |r| {
        r.if_weight_version = Some(1);
        r.min_weight_version = Some(2);
    });
    check("request_id", "257 bytes are more than 256", |r| r.request_id = "x".repeat(257));
    check("time_limit_seconds", "NaN is not a number", |r| r.time_limit_seconds = Some(f64::NAN));
    check("time_limit_seconds", "-0.5 is not a number", |r| r.time_limit_seconds = Some(-0.5));
}

#[test]
fn a_small_vocabulary_limits_top_logprobs() {
    let small = crate::server::ModelFacts { vocab_size: 50, eos_token_ids: vec![], ..model() };
    let ask = |top_logprobs| generate(pb::GenerateRequest { top_logprobs, ..base() }, &small);
    assert!(ask(50).is_ok());
    assert_eq!(refusal(ask(51)), ("top_logprobs".into(), "51 is more than the vocabulary size 50".into()));
}

#[test]
fn wrong_numbers_are_refused() {
    check("sampling.temperature", "NaN is not a number >= 0", |r| sampling(r).temperature = Some(f32::NAN));
    check("sampling.temperature", "inf is not", |r| sampling(r).temperature = Some(f32::INFINITY));
    check("sampling.temperature", "-0.1 is not", |r| sampling(r).temperature = Some(-0.1));
    check("sampling.temperature", "is not", |r| sampling(r).temperature = Some(1e-7));
    check("sampling.top_p", "0 is not a number in (0, 1]", |r| sampling(r).top_p = Some(0.0));
    check("sampling.top_p", "1.5 is not", |r| sampling(r).top_p = Some(1.5));
    check("sampling.top_p", "NaN is not", |r| sampling(r).top_p = Some(f32::NAN));
    check("sampling.min_p", "-0.5 is not a number in [0, 1]", |r| sampling(r).min_p = Some(-0.5));
    check("sampling.min_p", "NaN is not", |r| sampling(r).min_p = Some(f32::NAN));
    check("sampling.repetition_penalty", "0 is not", |r| sampling(r).repetition_penalty = Some(0.0));
    check("sampling.repetition_penalty", "-1 is not", |r| sampling(r).repetition_penalty = Some(-1.0));
    check("sampling.repetition_penalty", "NaN is not", |r| sampling(r).repetition_penalty = Some(f32::NAN));
    check("sampling.presence_penalty", "2.5 is not", |r| sampling(r).presence_penalty = Some(2.5));
    check("sampling.presence_penalty", "NaN is not", |r| sampling(r).presence_penalty = Some(f32::NAN));
    check("sampling.frequency_penalty", "-3 is not", |r| sampling(r).frequency_penalty = Some(-3.0));
    check("sampling.frequency_penalty", "NaN is not", |r| sampling(r).frequency_penalty = Some(f32::NAN));
    check("sampling.top_k", "-2 is neither -1 nor a count", |r| sampling(r).top_k = Some(-2));
    check("sampling.logit_bias[7]", "NaN is not", |r| {
        sampling(r).logit_bias.insert(7, f32::NAN);
    });
    check("sampling.logit_bias[7]", "-inf is not", |r| {
        sampling(r).logit_bias.insert(7, f32::NEG_INFINITY);
    });
    check("sampling.logit_bias[100]", "100 is not below the vocabulary size 100", |r| {
        sampling(r).logit_bias.insert(100, 1.0);
    });
}

#[test]
fn wrong_ends_are_refused() {
    check("sampling.max_tokens", "0 tokens", |r| sampling(r).max_tokens = Some(0));
    check("sampling.min_tokens", "5 is more than max_tokens 4", |r| {
        sampling(r).max_tokens = Some(4);
        sampling(r).min_tokens = Some(5);
    });
    check("sampling.min_tokens", "17 is more than max_tokens 16", |r| sampling(r).min_tokens = Some(17));
    check("logprob_token_ids", "129 tokens are more than 128", |r| r.logprob_token_ids = vec![0; 129]);
    check("logprob_token_ids[1]", "100 is not below", |r| r.logprob_token_ids = vec![1, 100]);
    check("prompts[0].logprob_token_ids", "3 rows are more than the 2 tokens after the prompt's first", |r| {
        r.prompts[0].logprob_token_ids = vec![pb::TokenIds::default(); 3];
    });
    check("prompts[1].logprob_token_ids", "1 rows are more than the 0 tokens", |r| {
        r.prompts[1].logprob_token_ids = vec![pb::TokenIds::default()];
    });
    check("prompts[0].logprob_token_ids[1].ids", "129 tokens are more than 128", |r| {
        r.prompts[0].logprob_token_ids = vec![pb::TokenIds::default(), pb::TokenIds { ids: vec![0; 129] }];
    });
    check("prompts[0].logprob_token_ids[0].ids[1]", "100 is not below", |r| {
        r.prompts[0].logprob_token_ids = vec![pb::TokenIds { ids: vec![1, 100] }];
    });
    check("sampling.stop_token_ids[1]", "100 is not below", |r| sampling(r).stop_token_ids = vec![1, 100]);
    check("sampling.allowed_token_ids[0]", "100 is not below", |r| sampling(r).allowed_token_ids = vec![100]);
    check("sampling.stop", "no tokenizer", |r| sampling(r).stop = vec!["x".into()]);
    check("sampling.allowed_token_ids", "every token ends the sample, but min_tokens is 1", |r| {
        sampling(r).allowed_token_ids = vec![5, 99];
        sampling(r).stop_token_ids = vec![5];
        sampling(r).min_tokens = Some(1);
    });
    check("sampling.stop_token_ids", "every token ends the sample", |r| {
        sampling(r).stop_token_ids = (0..99).collect();
        sampling(r).min_tokens = Some(1);
    });
}

#[test]
fn defaults_are_those_of_the_proto() {
    let valid = generate(pb::GenerateRequest { prompts: vec![tokens(&[1])], ..Default::default() }, &model())
        .expect("a prompt is enough");
    assert_eq!(*valid.params, SamplingParams { eos_token_ids: vec![99], ..SamplingParams::default() });
    assert!(valid.request_id.starts_with("req-"), "{}", valid.request_id);
    assert!(matches!(
        valid.kind,
        RequestKind::Generate { n: 1, prompt_logprobs: false, stream_tokens: false, return_text: false, .. }
    ));
    assert_eq!((valid.if_weight_version, valid.min_weight_version), (None, None));
}

#[test]
fn every_field_arrives() {
    let request = pb::GenerateRequest {
        request_id: "mine".into(),
        prompts: vec![tokens(&[7; 7])],
        n: Some(1024),
        sampling: Some(pb::SamplingParams {
            temperature: Some(0.0),
            top_k: Some(1000),
            top_p: Some(0.5),
            min_p: Some(1.0),
            repetition_penalty: Some(1.25),
            presence_penalty: Some(-2.0),
            frequency_penalty: Some(2.0),
            logit_bias: [(9, -1.0), (3, 2.0), (99, 1e9)].into(),
            allowed_token_ids: vec![9, 3, 9],
            min_tokens: Some(4),
            max_tokens: Some(1_000_000),
            stop_token_ids: vec![8, 6, 8],
            stop: Vec::new(),
            ignore_eos: true,
            seed: Some(u64::MAX),
            skip_special_tokens: Some(false),
            ..pb::SamplingParams::default()
        }),
        top_logprobs: 100,
        logprob_token_ids: vec![5, 3],
        top_logprobs_of: pb::Distribution::Processed.into(),
        prompt_logprobs: true,
        stream_tokens: true,
        if_weight_version: Some(3),
        min_weight_version: Some(3),
        ..Default::default()
    };
    let valid = generate(request, &model()).expect("valid");
    let params = SamplingParams {
        temperature: 0.0,
        top_k: 1000,
        top_p: 0.5,
        min_p: 1.0,
        repetition_penalty: 1.25,
        presence_penalty: -2.0,
        frequency_penalty: 2.0,
        logit_bias: vec![(3, 2.0), (9, -1.0), (99, 1e9)],
        allowed_tokens: Some(vec![3, 9]),
        min_tokens: 4,
        max_tokens: 1_000_000,
        eos_token_ids: Vec::new(),
        stop_token_ids: vec![6, 8],
        stop_strings: Vec::new(),
        bad_words: Vec::new(),
        skip_special_tokens: false,
        thinking: None,
        top_logprobs: 100,
        logprob_token_ids: [5, 3].into(),
        top_logprobs_of: Distribution::Processed,
        ..SamplingParams::default()
    };
    assert_eq!(*valid.params, params);
    assert_eq!(
        valid.kind,
        RequestKind::Generate {
            n: 1024,
            seed: u64::MAX,
            prompt_logprobs: true,
            stream_tokens: true,
            return_text: false
        }
    );
    assert_eq!(valid.prompts, [Prompt::from_tokens([7; 7])]);
    assert_eq!(valid.request_id, "mine");
    assert_eq!((valid.if_weight_version, valid.min_weight_version), (Some(3), Some(3)));
}

#[test]
fn a_prompt_s_own_sampling_is_checked_as_the_request_s_and_replaces_it() {
    let own = |sampling| pb::Prompt { sampling: Some(Box::new(sampling)), ..tokens(&[4]) };
    let with = |sampling| pb::GenerateRequest {
        prompts: vec![tokens(&[1]), own(sampling)],
        sampling: Some(pb::SamplingParams { temperature: Some(0.5), seed: Some(7), ..Default::default() }),
        top_logprobs: 3,
        top_logprobs_of: pb::Distribution::Processed.into(),
        ..Default::default()
    };
    let refused = |sampling| refusal(generate(with(sampling), &model()));
    let (path, message) = refused(pb::SamplingParams { max_tokens: Some(0), ..Default::default() });
    assert_eq!(path, "prompts[1].sampling.max_tokens", "{message}");
    let (path, message) = refused(pb::SamplingParams { stop: vec!["x".into()], ..Default::default() });
    assert_eq!(path, "prompts[1].sampling.stop", "{message}");
    let structured = pb::StructuredOutputs { kind: Some(pb::structured_outputs::Kind::JsonObject(true)) };
    let (path, message) = refused(pb::SamplingParams { structured_outputs: Some(structured), ..Default::default() });
    assert_eq!(path, "prompts[1].sampling.structured_outputs", "{message}");

    let given = pb::SamplingParams { max_tokens: Some(3), seed: Some(8), ..Default::default() };
    let valid = generate(with(given), &model()).expect("valid");
    let [(1, own)] = &valid.prompt_sampling.iter().collect::<Vec<_>>()[..] else { panic!("one prompt has its own") };
    let shared = SamplingParams {
        eos_token_ids: vec![99],
        top_logprobs: 3,
        top_logprobs_of: Distribution::Processed,
        ..Default::default()
    };
    assert_eq!(*own.params, SamplingParams { max_tokens: 3, ..shared.clone() });
    assert_eq!((own.seed, own.grammar.is_none()), (Some(8), true));
    assert_eq!(*valid.params, SamplingParams { temperature: 0.5, ..shared });
    assert!(matches!(valid.kind, RequestKind::Generate { seed: 7, .. }));
}

#[test]
fn a_time_limit_may_be_as_long_as_it_likes() {
    let limit = |time_limit_seconds| {
        generate(pb::GenerateRequest { time_limit_seconds, ..base() }, &model()).expect("valid").time_limit
    };
    assert_eq!(limit(None), None);
    assert_eq!(limit(Some(0.0)), Some(Duration::ZERO));
    assert_eq!(limit(Some(0.25)), Some(Duration::from_millis(250)));
    assert_eq!(limit(Some(1e300)), Some(Duration::MAX));
    assert_eq!(limit(Some(f64::INFINITY)), Some(Duration::MAX));
}

#[test]
fn minus_one_leaves_no_token_out() {
    for off in [-1, 0] {
        let mut request = base();
        sampling(&mut request).top_k = Some(off);
        assert_eq!(generate(request, &model()).expect("it means off").params.top_k, 0);
    }
}

#[test]
fn unseeded_requests_get_different_seeds() {
    let seed = || match generate(base(), &model()).expect("valid").kind {
        RequestKind::Generate { seed, .. } => seed,
        RequestKind::Score => panic!("not a score"),
    };
    assert_ne!(seed(), seed());
}

#[test]
fn negative_zero_is_greedy() {
    let mut request = base();
    sampling(&mut request).temperature = Some(-0.0);
    let valid = generate(request, &model()).expect("-0 is 0");
    assert_eq!(valid.params.temperature.to_bits(), 0);
}

fn check_score(field: &str, says: &str, change: fn(&mut pb::ScoreRequest)) {
    let ids = |ids: &[u32]| pb::TokenIds { ids: ids.to_vec() };
    let mut request = pb::ScoreRequest {
        sequences: vec![ids(&[1]), ids(&[2; 8])],
        sampling: Some(pb::SamplingParams { temperature: Some(0.5), top_k: Some(3), ..Default::default() }),
        ..Default::default()
    };
    let valid = score(request.clone(), &model()).expect("the base must be valid");
    assert_eq!((valid.kind, valid.params.temperature, valid.params.top_k), (RequestKind::Score, 0.5, 3));
    change(&mut request);
    let (path, message) = refusal(score(request, &model()));
    assert_eq!(path, field, "{message}");
    assert!(message.contains(says), "{path}: {message:?} does not say {says:?}");
}

#[test]
fn wrong_scores_are_refused() {
    check_score("sequences", "is empty", |r| r.sequences.clear());
    check_score("sequences[1]", "is empty", |r| r.sequences[1].ids.clear());
    check_score("sequences[1]", "9 tokens are more than the context of 8", |r| r.sequences[1].ids.push(1));
    check_score("sequences[0].ids[0]", "100 is not below", |r| r.sequences[0].ids[0] = 100);
    check_score("sequences", "65537 sequences are more than 65536", |r| {
        r.sequences = vec![pb::TokenIds { ids: vec![1] }; 65_537];
    });
    check_score("top_logprobs", "101", |r| r.top_logprobs = 101);
    check_score("logprob_token_ids", "1 for 2 sequences", |r| r.logprob_token_ids = vec![pb::TokenRows::default()]);
    check_score("logprob_token_ids[1].rows[0].ids[0]", "100 is not below", |r| {
        let rows = vec![pb::TokenIds { ids: vec![100] }];
        r.logprob_token_ids = vec![pb::TokenRows::default(), pb::TokenRows { rows }];
    });
    check_score("if_weight_version", "both can never hold", |r| {
        r.if_weight_version = Some(0);
        r.min_weight_version = Some(1);
    });
    check_score("sampling.temperature", "NaN", |r| r.sampling.as_mut().expect("set").temperature = Some(f32::NAN));
}

#[test]
fn score_refuses_what_only_sampling_uses() {
    fn check(name: &str, change: fn(&mut pb::SamplingParams)) {
        let mut p = pb::SamplingParams::default();
        change(&mut p);
        let sequences = vec![pb::TokenIds { ids: vec![1, 2] }];
        let request = pb::ScoreRequest { sequences, sampling: Some(p), ..Default::default() };
        let (path, message) = refusal(score(request, &model()));
        assert_eq!(path, format!("sampling.{name}"));
        assert!(message.contains("no meaning in Score"), "{message}");
    }
    check("repetition_penalty", |p| p.repetition_penalty = Some(1.0));
    check("presence_penalty", |p| p.presence_penalty = Some(0.0));
    check("frequency_penalty", |p| p.frequency_penalty = Some(0.0));
    check("min_tokens", |p| p.min_tokens = Some(0));
    check("max_tokens", |p| p.max_tokens = Some(1));
    check("stop_token_ids", |p| p.stop_token_ids = vec![1]);
    check("stop", |p| p.stop = vec!["x".into()]);
    check("ignore_eos", |p| p.ignore_eos = true);
    check("bad_words", |p| p.bad_words = vec!["x".into()]);
    check("skip_special_tokens", |p| p.skip_special_tokens = Some(true));
    check("seed", |p| p.seed = Some(1));
}

#[test]
fn abort_names_requests_or_all() {
    let ids = || vec!["a".to_owned()];
    let request = |all, request_ids| pb::AbortRequest { all, request_ids };
    assert_eq!(abort(request(true, Vec::new())).expect("valid"), AbortTarget::All);
    assert_eq!(abort(request(false, ids())).expect("valid"), AbortTarget::Requests(ids()));
    assert_eq!(refusal(abort(request(true, ids()))).0, "all");
    assert_eq!(refusal(abort(request(false, Vec::new()))).0, "request_ids");
}

#[test]
fn a_prompt_is_cut_at_either_end() {
    let cut = |keep_tokens, keep_first| {
        let prompts = vec![pb::Prompt { keep_tokens, keep_first, ..tokens(&[1, 2, 3, 4, 5, 6, 7, 8, 9]) }];
        let request = pb::GenerateRequest { prompts, ..Default::default() };
        generate(request, &model()).map(|valid| valid.prompts[0].tokens.to_vec())
    };
    assert_eq!(cut(Some(2), false).expect("valid"), [8, 9]);
    assert_eq!(cut(Some(2), true).expect("valid"), [1, 2]);
    assert_eq!(cut(Some(7), false).expect("fits"), [3, 4, 5, 6, 7, 8, 9]);
    for (kept, field) in
        [(None, "prompts[0].tokens"), (Some(9), "prompts[0].tokens"), (Some(0), "prompts[0].keep_tokens")]
    {
        let error = cut(kept, false).expect_err("refused").to_string();
        assert!(error.starts_with(&format!("{field}: ")), "{error}");
    }
}
