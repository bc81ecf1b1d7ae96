mod adapters;
mod devices;
pub mod harness;
mod pushes;
mod sleep;
mod tower;

use std::sync::Arc;

use rollout_kernels::StorageDtype;

use crate::executor::Executor;
use crate::types::{RequestKey, SamplingParams, StepPlan};
use harness::{Setup, fixture, sequence};

/// A step of three sequences of seven scored tokens, each of a request of its own. `bad`: what is asked of the second
/// is nothing that the door would let in.
fn three_requests(bad: bool) -> StepPlan {
    let tokens = [1, 2, 3, 4, 5, 6, 7];
    let sequences = (0..3).map(|request| {
        let mut sequence = sequence(request, &tokens, None);
        // Beyond the vocabulary.
        let token = if bad && request == 1 { 512 } else { 1 };
        for task in sequence.logits.iter_mut().flat_map(|row| &mut row.tasks) {
            task.sample.group.request = RequestKey(request as u64);
            task.params = Arc::new(SamplingParams { logit_bias: vec![(token, 0.5)], ..Default::default() });
        }
        sequence
    });
    StepPlan { sequences: sequences.collect(), ..StepPlan::default() }
}

#[test]
fn a_panic_in_an_answer_is_reported_and_spoils_no_other_answer() {
    let mut ranks = Setup::open(&fixture("llama"), StorageDtype::F32, 1).ranks();
    let mut run = |bad| {
        ranks.launch(Arc::new(three_requests(bad))).unwrap();
        ranks.collect().unwrap()
    };
    let good = run(false);
    let broken = run(true);
    assert!(good.failed.is_empty());
    assert!(!broken.failed.is_empty() && broken.failed.iter().all(|(key, _)| *key == RequestKey(1)), "{broken:?}");
    assert!(broken.failed[0].1.contains("index out of bounds"), "{:?}", broken.failed[0]);
    for request in [0, 2] {
        assert_eq!(broken.tokens[request * 7..][..7], good.tokens[request * 7..][..7], "request {request}");
    }
    assert_eq!(run(false).tokens, good.tokens, "the next step");
}
