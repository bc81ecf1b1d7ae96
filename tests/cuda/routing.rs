//! The experts that tokens take on a CUDA device: those of transformers and of the processor, the same however they
//! are computed, and taken again where they are given.

use rollout_server::types::{ForcedRouting, SamplingParams, TokenId};

use crate::common::{Engine, Reply, Request, random_prompts, recorded_routing};
use crate::own_driver;

/// Two layers with experts of three, one of two with 60 of them, and a router with a bias.
const MODELS: [&str; 3] = ["qwen3_moe", "qwen3_moe_60", "glm4_moe"];
/// Bytes of the experts of a token of each of them.
const ROW: usize = 4;
/// Tokens of each sequence that are compared with transformers.
const COMPARED: usize = 48;
const SEED: u64 = 42;

fn start(model: &str, dtype: &str, flags: &[&str]) -> Engine {
    Engine::start(model, &[&["--device", "cuda", "--return-routing", "--dtype", dtype], flags].concat())
}

/// Prompts of which two share a prefix of more than a block.
fn prompts() -> Vec<Vec<TokenId>> {
    let stem = random_prompts(42, 1, 20..21, 250).remove(0);
    let tails = random_prompts(43, 2, 1..12, 250);
    random_prompts(41, 2, 1..30, 250).into_iter().chain(tails.iter().map(|tail| [&stem[..], tail].concat())).collect()
}

fn answer(engine: &Engine, request: Request) -> Reply {
    let reply = engine.generate(Request { return_routing: true, ..request });
    assert!(reply.error.is_none(), "{:?}", reply.error);
    reply
}

fn request() -> Request {
    let params = SamplingParams { max_tokens: 5, temperature: 0.8, top_p: 0.9, ..Default::default() };
    Request::generate(prompts(), 1, SEED, 0).params(params)
}

/// Everything that equalities compare.
fn all(reply: &Reply) -> impl PartialEq + std::fmt::Debug + use<> {
    let of_samples: Vec<_> = reply.completions.iter().map(|completion| completion.routing.clone()).collect();
    (reply.bits(), of_samples, reply.prompt_routing.clone())
}

#[test]
fn scored_tokens_take_the_experts_of_transformers_and_of_the_processor() {
    let _own = own_driver();
    for model in MODELS {
        let (sequences, expected) = recorded_routing(model);
        let score = || Request::score(sequences.iter().map(|sequence| sequence[..COMPARED].to_vec()).collect());
        let ours = answer(&start(model, "float32", &[]), score());
        for (index, rows) in (0..).zip(expected) {
            // The last token is not run.
            assert_eq!(ours.prompt_routing[&index], rows[..COMPARED - 1].concat(), "{model}: sequence {index}");
        }
        let processors = answer(&Engine::start(model, &["--return-routing", "--dtype", "float32"]), score());
        assert_eq!(ours.prompt_routing, processors.prompt_routing, "{model}");
    }
}

#[test]
fn experts_are_the_same_cached_in_chunks_eagerly_and_on_ranks_and_where_they_are_given() {
    let _own = own_driver();
    for (model, dtype) in MODELS.into_iter().zip(["bfloat16", "float32", "bfloat16"]) {
        let engine = start(model, dtype, &[]);
        let free = answer(&engine, request());
        for completion in &free.completions {
            let prompt = &prompts()[completion.prompt_index as usize];
            assert_eq!(completion.routing.len(), (completion.tokens.len() - 1) * ROW);
            assert_eq!(free.prompt_routing[&completion.prompt_index].len(), prompt.len() * ROW);
        }
        let cached = answer(&engine, request());
        assert!(cached.completions.iter().any(|completion| completion.cached_tokens > 0), "{model}: nothing is cached");
        assert_eq!(all(&cached), all(&free), "{model} {dtype}: from the prefix cache");
        for flags in [["--max-batch-tokens", "7"], ["--graphs", "off"], ["--tp", "4"]] {
            let other = answer(&start(model, dtype, &flags), request());
            assert_eq!(all(&other), all(&free), "{model} {dtype} {flags:?}");
        }
        let forced = |first: usize, rows: &[u8]| Some(ForcedRouting::new(first, ROW, rows));
        let given = (0..).zip(prompts()).map(|(prompt, _)| forced(0, &free.prompt_routing[&prompt])).collect();
        let replayed = answer(&engine, Request { routing: given, ..request() });
        assert_eq!(all(&replayed), all(&free), "{model} {dtype}: replayed");

        let sampled = free.completions.iter().map(|completion| {
            let tokens = completion.tokens.iter().map(|token| token.token);
            let tokens = prompts()[completion.prompt_index as usize].iter().copied().chain(tokens).collect();
            (tokens, [&free.prompt_routing[&completion.prompt_index], &completion.routing[..]].concat())
        });
        let (sequences, rows): (Vec<Vec<TokenId>>, Vec<Vec<u8>>) = sampled.unzip();
        let scored = answer(&engine, Request::score(sequences.clone()));
        for (index, rows) in (0..).zip(&rows) {
            assert_eq!(&scored.prompt_routing[&index], rows, "{model} {dtype}: scored");
        }
        let half = |rows: &Vec<u8>| forced(rows.len() / ROW / 2, &rows[rows.len() / ROW / 2 * ROW..]);
        for routing in [rows.iter().map(|rows| forced(0, rows)).collect(), rows.iter().map(half).collect::<Vec<_>>()] {
            let replayed = answer(&engine, Request { routing, ..Request::score(sequences.clone()) });
            assert_eq!(replayed.prompt_logprobs, scored.prompt_logprobs, "{model} {dtype}: scored again");
            assert_eq!(replayed.prompt_routing, scored.prompt_routing, "{model} {dtype}: scored again");
        }
    }
}

/// Steps of prompts of one token have one row of each sequence from the first on, so that all are graphs.
#[test]
fn a_graph_returns_the_experts_of_all_its_rows_after_a_step_of_fewer() {
    let _own = own_driver();
    let engine = start("qwen3_moe", "bfloat16", &["--graphs", "on", "--speculation", "off"]);
    let run = |count| answer(&engine, Request { prompts: (0..count).map(|token| vec![token]).collect(), ..request() });
    let expected = run(7);
    assert_eq!(expected.prompt_routing.len(), 7);
    run(1);
    assert_eq!(all(&run(7)), all(&expected));
}

#[test]
fn other_experts_than_the_routers_change_what_is_computed_and_what_is_cached() {
    let _own = own_driver();
    // Not that of one layer with experts, its last: nothing later reads what they give for a prompt's tokens.
    for model in ["qwen3_moe", "glm4_moe"] {
        let (engine, prompt) = (start(model, "bfloat16", &[]), random_prompts(44, 1, 40..41, 250));
        let one = || Request { prompts: prompt.clone(), ..request() };
        let free = answer(&engine, one());
        let row = [0, 1, 0, 1];
        let run = || {
            let routing = vec![Some(ForcedRouting::new(20, ROW, row.repeat(12)))];
            answer(&engine, Request { routing, ..one() })
        };
        let forced = run();
        assert!(forced.bits() != free.bits(), "{model}: the bits are those of other experts");
        assert_eq!(forced.completions[0].cached_tokens, 16, "{model}: the block before the first forced token");
        let mut taken = forced.prompt_routing[&0][20 * ROW..32 * ROW].to_vec();
        taken.chunks_exact_mut(2).for_each(<[u8]>::sort_unstable);
        assert_eq!(taken, row.repeat(12), "{model}");
        let again = run();
        assert_eq!(again.completions[0].cached_tokens, 32, "{model}: all full blocks");
        assert_eq!(all(&again), all(&forced), "{model}");
        assert_eq!(all(&answer(&engine, one())), all(&free), "{model}: free again");
    }
}
