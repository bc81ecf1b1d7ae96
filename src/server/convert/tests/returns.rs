//! Requests for further values beside log-probabilities.

use super::{generate, model, refusal, score};
use crate::engine::TopArrays;
use crate::server::pb;
use crate::types::{Distribution, TaskReturns};

fn generating(returns: pb::Returns) -> pb::GenerateRequest {
    let kind = Some(pb::prompt::Kind::Tokens(pb::TokenIds { ids: vec![1, 2] }));
    pb::GenerateRequest {
        prompts: vec![pb::Prompt { kind, ..Default::default() }],
        returns: Some(returns),
        ..Default::default()
    }
}

fn scoring(returns: pb::Returns) -> pb::ScoreRequest {
    pb::ScoreRequest { sequences: vec![pb::TokenIds { ids: vec![1, 2] }], returns: Some(returns), ..Default::default() }
}

#[test]
fn every_value_arrives_in_generate_and_in_score() {
    let given = pb::Returns {
        entropy: true,
        support: true,
        max_support_ids: Some(65_536),
        top: 100,
        top_of: pb::Distribution::Processed.into(),
        top_as_bfloat16: true,
        ..Default::default()
    };
    let requests = [generate(generating(given.clone()), &model()).unwrap(), score(scoring(given), &model()).unwrap()];
    for request in requests {
        let params = &request.params;
        assert_eq!(params.returns, TaskReturns { entropy: true, support: Some(65_536) });
        assert_eq!((params.top_logprobs, params.top_logprobs_of), (100, Distribution::Processed));
        assert_eq!(request.top_arrays, Some(TopArrays { as_bfloat16: true }));
    }
}

#[test]
fn nothing_is_returned_by_default_and_a_support_has_4096_ids() {
    let params = generate(generating(pb::Returns::default()), &model()).unwrap().params;
    assert_eq!((params.returns, params.top_logprobs), (TaskReturns::default(), 0));
    let support = pb::Returns { support: true, ..Default::default() };
    let request = generate(generating(support), &model()).unwrap();
    assert_eq!(request.params.returns, TaskReturns { entropy: false, support: Some(4096) });
    assert_eq!(request.top_arrays, None);
}

#[test]
fn lists_beside_arrays_keep_their_distribution() {
    let returns = pb::Returns { entropy: true, top_of: pb::Distribution::Processed.into(), ..Default::default() };
    let request = pb::GenerateRequest { top_logprobs: 5, ..generating(returns) };
    let params = generate(request, &model()).unwrap().params;
    assert_eq!((params.top_logprobs, params.top_logprobs_of), (5, Distribution::Raw));
}

#[test]
fn wrong_values_are_rejected_by_name() {
    let cases = [
        (pb::Returns { top: 1025, ..Default::default() }, "returns.top", "1025 is more than 1024"),
        (pb::Returns { top: 101, ..Default::default() }, "returns.top", "101 is more than the vocabulary size 100"),
        (pb::Returns { top_of: 9, ..Default::default() }, "returns.top_of", "9 is not a Distribution"),
        (
            pb::Returns { support: true, max_support_ids: Some(65_537), ..Default::default() },
            "returns.max_support_ids",
            "65537 ids are more than 65536",
        ),
        (
            pb::Returns { max_support_ids: Some(5), ..Default::default() },
            "returns.max_support_ids",
            "means nothing without returns.support",
        ),
    ];
    for (returns, path, message) in cases {
        for (found, text) in
            [refusal(generate(generating(returns.clone()), &model())), refusal(score(scoring(returns), &model()))]
        {
            assert!(found == path && text.contains(message), "{found}: {text}");
        }
    }
}

#[test]
fn arrays_and_lists_of_likely_tokens_exclude_each_other() {
    let top = pb::Returns { top: 3, ..Default::default() };
    let request = pb::GenerateRequest { top_logprobs: 3, ..generating(top.clone()) };
    assert_eq!(refusal(generate(request, &model())).0, "returns.top");
    let request = pb::GenerateRequest { logprob_token_ids: vec![4], ..generating(top.clone()) };
    assert_eq!(refusal(generate(request, &model())).0, "returns.top");
    let request = pb::ScoreRequest { top_logprobs: 3, ..scoring(top.clone()) };
    assert_eq!(refusal(score(request, &model())).0, "returns.top");
    let rows = vec![pb::TokenRows { rows: vec![pb::TokenIds { ids: vec![4] }] }];
    let processed = pb::Returns { top: 3, top_of: pb::Distribution::Processed.into(), ..Default::default() };
    let request = pb::ScoreRequest { logprob_token_ids: rows.clone(), ..scoring(processed) };
    assert_eq!(refusal(score(request, &model())).0, "returns.top_of");
    let request = pb::ScoreRequest { logprob_token_ids: rows, ..scoring(top) };
    assert!(score(request, &model()).is_ok(), "both are RAW");
}
