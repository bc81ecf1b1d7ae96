//! A real engine behind the server: text in, groups out, nothing left behind.

use std::time::Duration;

use clap::Parser;
use rollout_server::config::Config;
use rollout_server::server::pb::rollout_client::RolloutClient;
use rollout_server::server::pb::{self, generate_response::Event, prompt::Kind};
use rollout_server::server::{Bound, Ended, serve, shutdown_channel};
use rollout_server::startup;
use tonic::transport::Channel;

use crate::harness;

fn request(prompts: Vec<Kind>, n: u32, seed: u64) -> pb::GenerateRequest {
    let sampling = pb::SamplingParams { max_tokens: Some(12), seed: Some(seed), ..Default::default() };
    pb::GenerateRequest {
        prompts: prompts.into_iter().map(|kind| pb::Prompt { kind: Some(kind) }).collect(),
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
            Event::Summary(_) => summaries += 1,
            other => panic!("not asked for: {other:?}"),
        }
    }
    assert_eq!(summaries, 1);
    completions.sort_by_key(|c| (c.prompt_index, c.sample_index));
    completions
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn groups_are_sampled_scored_and_replayed_through_the_whole_server() {
    let model = concat!(env!("CARGO_MANIFEST_DIR"), "/tests/fixtures/qwen2");
    let flags = ["rollout-server", "--model", model, "--tp", "2", "--kv-cache-bytes", "16MiB"];
    let config = Config::try_parse_from(flags).expect("good flags");
    let (parts, engine) = startup::start(&config).expect("the fixture loads").into_parts(&config);
    let bound = Bound::new(&harness::config(0)).expect("a free port");
    let url = format!("http://{}", bound.address());
    let (shutdown, orders) = shutdown_channel();
    let server = tokio::spawn(serve(bound, std::future::ready(Ok(parts)), orders));
    let channel = Channel::from_shared(url).expect("a URL").connect().await.expect("the server listens");
    let mut client = RolloutClient::new(channel.clone());

    let chat = pb::Chat { messages: vec![pb::ChatMessage { role: "user".into(), content: "Hello".into() }] };
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
    assert_eq!(scores.into_inner().scores[0].raw_logprobs[ids.len()..], group[3].raw_logprobs);

    // A stream that is dropped after its first message.
    let mut long = request(vec![Kind::Text("a".into())], 8, 1);
    long.stream_tokens = true;
    long.sampling.as_mut().expect("it has").max_tokens = Some(900);
    let mut stream = client.generate(long).await.expect("the request is good").into_inner();
    stream.message().await.expect("a message").expect("an event");
    drop(stream);
    let mut control = pb::control_client::ControlClient::new(channel);
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

    shutdown.order();
    assert_eq!(server.await.expect("no panic").expect("a good end"), Ended::Drained);
    engine.join().expect("no panic").expect("the engine ends well");
}
