//! A real engine behind the server: text goes in, groups come out, and nothing is left behind.

use std::collections::HashSet;
use std::time::Duration;

use clap::Parser;
use rollout_server::config::Config;
use rollout_server::error::Result;
use rollout_server::observe::Observer;
use rollout_server::server::pb::rollout_client::RolloutClient;
use rollout_server::server::pb::{self, generate_response::Event, prompt::Kind};
use rollout_server::server::{Bound, Ended, ShutdownHandle, serve, shutdown_channel};
use rollout_server::startup;
use tonic::transport::Channel;

use super::harness;

fn request(prompts: Vec<Kind>, n: u32, seed: u64) -> pb::GenerateRequest {
    let sampling = pb::SamplingParams { max_tokens: Some(12), seed: Some(seed), ..Default::default() };
    pb::GenerateRequest {
        prompts: prompts.into_iter().map(|kind| pb::Prompt { kind: Some(kind), ..Default::default() }).collect(),
        n: Some(n),
        sampling: Some(sampling),
        return_text: true,
        ..Default::default()
    }
}

async fn generate(client: &mut RolloutClient<Channel>, request: pb::GenerateRequest) -> Vec<pb::Completion> {
    let mut stream = client.generate(request).await.expect("the request is good").into_inner();
    let (mut completions, mut summaries) = (Vec::new(), 0);
    while let Some(message) = stream.message().await.expect("the stream goes on") {
        match message.event.expect("an event") {
            Event::Completion(c) => completions.push(c),
            Event::Prompt(prompt) => assert!(!prompt.token_ids.is_empty()),
            Event::Summary(_) => summaries += 1,
            other => panic!("not asked for: {other:?}"),
        }
    }
    assert_eq!(summaries, 1);
    completions.sort_by_key(|c| (c.prompt_index, c.sample_index));
    completions
}

/// A server on a fixture, with a connection to it.
struct Real {
    channel: Channel,
    shutdown: ShutdownHandle,
    server: tokio::task::JoinHandle<Result<Ended>>,
    engine: std::thread::JoinHandle<Result<()>>,
}

impl Real {
    async fn start(flags: &[&str]) -> Self {
        let model = concat!(env!("CARGO_MANIFEST_DIR"), "/tests/fixtures/qwen2");
        let base = ["rollout-server", "--model", model, "--kv-cache-bytes", "16MiB"];
        let config = Config::try_parse_from(base.iter().chain(flags)).expect("good flags");
        let (observer, recorder) = Observer::new();
        let (context, engine) = startup::start(&config, observer.clone(), recorder).expect("the fixture loads");
        let bound = Bound::new(&harness::config(0)).expect("a free port");
        let url = format!("http://{}", bound.address());
        let (shutdown, orders) = shutdown_channel();
        let server = tokio::spawn(serve(bound, observer, std::future::ready(Ok(context)), orders));
        let channel = Channel::from_shared(url).expect("a URL").connect().await.expect("the server listens");
        Self { channel, shutdown, server, engine }
    }

    async fn end(self) {
        drop(self.channel);
        self.shutdown.order();
        assert_eq!(self.server.await.expect("no panic").expect("a good end"), Ended::Drained);
        self.engine.join().expect("no panic").expect("the engine ends well");
    }
}

/// The token ids and both kinds of log-probabilities of a completion.
fn sample(completion: &pb::Completion) -> (&[u32], &[f32]) {
    (&completion.token_ids, &completion.logprobs)
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn equal_prompts_of_one_request_are_no_clones() {
    let real = Real::start(&[]).await;
    let mut client = RolloutClient::new(real.channel.clone());
    let prompt = || Kind::Tokens(pb::TokenIds { ids: (40..60).collect() });
    for seed in [None, Some(9)] {
        let mut together = request(vec![prompt(); 64], 1, 0);
        together.sampling.as_mut().expect("it has").seed = seed;
        let together = generate(&mut client, together).await;
        assert_eq!(together.len(), 64);
        let different: HashSet<_> = together.iter().map(|c| &c.token_ids).collect();
        assert_eq!(different.len(), 64, "seed {seed:?}: 12 tokens at temperature 1 are never the same twice");
        for (i, completion) in together.iter().enumerate() {
            let alone = generate(&mut client, request(vec![prompt()], 1, completion.seed)).await;
            assert_eq!(sample(&alone[0]), sample(completion), "seed {seed:?}, prompt {i}");
        }
        if let Some(seed) = seed {
            assert_eq!(together[0].seed, seed, "the first sample of the first prompt has the request's own seed");
        }
    }
    real.end().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn prompt_logprobs_come_beside_every_penalty() {
    let real = Real::start(&[]).await;
    let mut client = RolloutClient::new(real.channel.clone());
    let ids: Vec<u32> = (40..60).collect();
    let scores =
        client.score(pb::ScoreRequest { sequences: vec![pb::TokenIds { ids: ids.clone() }], ..Default::default() });
    let mut stream = scores.await.expect("it can be scored").into_inner();
    let scores = stream.message().await.expect("no error").expect("a score").score.expect("set");
    type Penalise = fn(&mut pb::SamplingParams);
    let penalties: [Penalise; 3] =
        [|s| s.repetition_penalty = Some(1.3), |s| s.presence_penalty = Some(0.5), |s| s.frequency_penalty = Some(0.5)];
    for penalise in penalties {
        let mut request = request(vec![Kind::Tokens(pb::TokenIds { ids: ids.clone() })], 2, 5);
        penalise(request.sampling.as_mut().expect("it has"));
        let without = generate(&mut client, request.clone()).await;
        request.prompt_logprobs = true;
        let mut stream = client.generate(request).await.expect("the request is good").into_inner();
        let (mut prompts, mut with) = (Vec::new(), Vec::new());
        while let Some(message) = stream.message().await.expect("the stream goes on") {
            match message.event.expect("an event") {
                Event::Prompt(_) => {}
                Event::PromptLogprobs(prompt) => prompts.push(prompt),
                Event::Completion(completion) => with.push(completion),
                _ => {}
            }
        }
        with.sort_by_key(|c| c.sample_index);
        assert_eq!(prompts.len(), 1);
        assert_eq!(prompts[0].raw_logprobs[1..], scores.raw_logprobs[1..], "penalties are no part of the prompt");
        assert!(with.iter().map(sample).eq(without.iter().map(sample)));
    }
    real.end().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn groups_are_sampled_scored_and_replayed_through_the_whole_server() {
    let real = Real::start(&["--tp", "2"]).await;
    let mut client = RolloutClient::new(real.channel.clone());

    let chat = pb::Chat {
        messages: vec![pb::ChatMessage { role: "user".into(), content: "Hello".into() }],
        ..Default::default()
    };
    let ids: Vec<u32> = (40..80).collect();
    let prompts = vec![Kind::Tokens(pb::TokenIds { ids: ids.clone() }), Kind::Text("Hello".into()), Kind::Chat(chat)];
    let group = generate(&mut client, request(prompts, 4, 5)).await;
    assert_eq!(group.len(), 12);
    assert!(group.iter().all(|c| c.text.is_some() && c.logprobs.len() == c.token_ids.len()));

    let replayed =
        generate(&mut client, request(vec![Kind::Tokens(pb::TokenIds { ids: ids.clone() })], 1, group[3].seed));
    let replayed = replayed.await;
    assert_eq!((&replayed[0].token_ids, &replayed[0].raw_logprobs), (&group[3].token_ids, &group[3].raw_logprobs));

    let sequences = vec![pb::TokenIds { ids: ids.iter().chain(&group[3].token_ids).copied().collect() }];
    let scores = client.score(pb::ScoreRequest { sequences, ..Default::default() }).await.expect("it can be scored");
    let scored = scores.into_inner().message().await.expect("no error").expect("a score");
    assert_eq!(scored.score.expect("set").raw_logprobs[ids.len()..], group[3].raw_logprobs);

    // The client drops a stream after its first message.
    let mut long = request(vec![Kind::Text("a".into())], 8, 1);
    long.stream_tokens = true;
    long.sampling.as_mut().expect("it has").max_tokens = Some(900);
    let mut stream = client.generate(long).await.expect("the request is good").into_inner();
    stream.message().await.expect("a message").expect("an event");
    drop(stream);
    let mut control = pb::control_client::ControlClient::new(real.channel.clone());
    let everything_is_free = async {
        loop {
            let status = control.get_status(pb::GetStatusRequest {}).await.expect("a status").into_inner();
            if status.free_blocks == status.total_blocks && status.running_requests == 0 {
                return status;
            }
            tokio::time::sleep(Duration::from_millis(5)).await;
        }
    };
    let status = tokio::time::timeout(harness::PATIENCE, everything_is_free).await.expect("the blocks come back");
    assert_eq!((status.aborted_requests, status.finished_requests), (1, 3));

    drop((client, control));
    real.end().await;
}
