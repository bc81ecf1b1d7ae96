//! rollout-server: a rollout inference server for RL fine-tuning.
//!
//! This page is the architecture: how a request travels, how a policy changes, what each layer knows, and which
//! invariants hold.
//!
//! # How a request travels
//!
//! ```text
//!  client ──gRPC──> server ──Command──> engine ──StepPlan──> executor ── rank 0: device, weights, KV, model
//!         ──HTTP──> (tokio)  bounded    (one               (one thread ─ rank 1
//!                      ^     channel     thread)             a rank)    ─ rank tp-1
//!                      └──────Event───────┘ <──StepOutput──────┘
//! ```
//!
//! 1. [`server`] parses the request into valid types (`server::convert`) and sends an [`engine::Command`]. It serves
//!    gRPC (`server::grpc`) and HTTP (`server::http`). An HTTP body is converted to the protobuf message that gRPC
//!    clients send, so that every check and default exists once. Each turns the engine's events into its own replies.
//! 2. [`engine`] adds each prompt with its samples as a group to the [`scheduler`].
//! 3. Each `step()`: `schedule → launch → collect → update`. The scheduler decides, as plain data (a
//!    [`types::StepPlan`]), which tokens of which sequences run; the [`executor`]'s ranks run them and sample; the
//!    scheduler records the tokens. The engine emits the events of a step while the ranks compute the next one.
//! 4. A stop rule, a stop string, an abort or a disconnect of the client ends a sample. Its blocks are freed at once.
//!    When all samples of a request have ended, the request gets its one terminal event.
//!
//! # How a policy changes
//!
//! A push is a transaction: the [`engine`] reserves its memory, and a `ReceivingPush` of [`weights`] receives and
//! verifies it beside the serving weights while generation keeps running. At the commit, the engine gives the
//! [`executor`] one order between two steps. The push's `RunningPolicy` says how it treats running requests. A LoRA is
//! merged into the base, never on top of the last adapter. Pause, sleep and wake change the state of the engine;
//! [`engine`] says which state allows which command.
//!
//! # Four walks
//!
//! Each walk goes down through the layers. A line names the function and, if its module does not suggest it, the file.
//!
//! A request, from the client to the sampler and back:
//!
//! ```text
//! server    grpc::rollout            generate: sets the deadline, and ends the request if the client disconnects
//!           convert::generate        turns the message into a valid request, and its texts into token ids
//! engine    receive (admission.rs)   accepts, or holds while the server is paused or the policy is too old
//! scheduler schedule                 makes a StepPlan; cache::hash hashes prefix blocks, cache::manager finds them
//! executor  Ranks::launch            gives every rank the plan
//!           ModelRunner::run         makes a FlatBatch (rows, positions, slots, tasks), and Ops::prepare a Step of it
//! model     Decoder::forward         calls Ops layer by layer: embed, linear, rope, write_kv, paged_attention
//!           Decoder::logits          computes the logits of the rows that have tasks
//! kernels   Ops::sample              samples a token with both log-probabilities for each task; one read returns all
//! scheduler update                   records the tokens, finishes samples, frees blocks
//! engine    emit                     sends events to the request's stream, with the text of the tokens (text.rs)
//! ```
//!
//! A pushed LoRA tensor, to the matrix:
//!
//! ```text
//! server    grpc::weights            Update: receives chunks
//! weights   ReceivingPush::write     PushedTensor::gather keeps the tensor and verifies it (push::verify)
//!           ReceivingPush::finish    push::adapter builds an Adapter, one WeightChange for each parameter
//! engine    apply_lora (update.rs)   WeightOrder::Merge between two steps
//! executor  RankWeights::merge       changes every parameter that the old or the new adapter touches
//!           LocalParameter::merge    reads the base: the checkpoint, or the copy that a push made
//! kernels   Ops::merge_rows          base + scaling * b a, rounded once, written to the matrix (cpu/merge.rs)
//! ```
//!
//! A tensor of a full push, to the matrix:
//!
//! ```text
//! engine    begin (update.rs)        Executor::shadow_weights: allocates storage in the shapes of the serving weights
//! server    grpc::weights            Update: receives chunks
//! weights   ReceivingPush::write     PushedTensor::stream: takes rows in order, digests and checks them (push::verify)
//!           ShadowTensor::write_rows writes each rank's part of the rows
//! kernels   Matrix::write_columns    packs them in the device's layout
//! weights   ReceivingPush::finish    checks that every tensor is complete and verified
//! engine    apply_packed             Executor::exchange between two steps
//! executor  RankWeights::exchange    swaps: the shadow serves, and the old weights are the next push's shadow
//! ```
//!
//! A sleep, to the freed memory:
//!
//! ```text
//! server    grpc::control            Sleep
//! engine    sleep (sleep.rs)         waits for requests, ends or keeps them; then releases in this order:
//! executor  Ranks::release           releases KV cache, then workspace; the devices measure the freed bytes
//!           Ranks::discard           drops the storage that the last full push left
//!           Ranks::release           releases the weights
//! kernels   KvCache, Matrix::release returns the memory to the system; restore takes it back at Wake
//! engine    sleep (sleep.rs)         lowers the ledger, and replies with the measured bytes
//! ```
//!
//! # Layers
//!
//! A module uses only modules to the right of it (`tests/structure` fails on any other edge):
//!
//! ```text
//! main, startup → server → engine → scheduler, executor → cache | model | grammar → weights, text, pixels, observe
//!   → comm, memory → types, clock, config, logs, profile, stacks → error
//! ```
//!
//! The crate [`rollout_kernels`] below all of them holds the devices: a closed set of backends behind one set of types,
//! `Device`, `Ops`, `Matrix`, `KvCache` and `DeviceBuffer`. No file in this crate names a device. [`profile`] sums the
//! trace-level spans of both crates. Files do not depend on each other in circles.
//!
//! # How it is simulated
//!
//! The engine has two inputs: the time, from a [`clock::Clock`], and commands, whose replies and events leave through
//! closures. [`engine::Engine::turn`] is one iteration of its loop and never blocks. `tests/simulation` runs the engine
//! and the layers below it in one thread on a virtual clock, with random clients and faults, and asserts the invariants
//! after every turn ([`engine::Engine::check_integrity`]). The simulation omits grammars, because a separate thread
//! computes their slow masks ([`grammar::MaskQueue`]).
//!
//! # Invariants
//!
//! 1. [`scheduler`] and [`cache`] know no device, clock, channel or runtime. Only [`server`] (and `main`) knows tonic,
//!    prost and tokio.
//! 2. [`model`] never mentions a rank number, a device, LoRA or a file format. Tensor parallelism is in the layers'
//!    [`weights::ShardRule`]s and the [`comm::Communicator`].
//! 3. One text for every decoder family: Llama, Qwen v1, Qwen2, Qwen3, Mistral, SmolLM3 and Phi-3, and Qwen2-MoE,
//!    Qwen3-MoE, Mixtral and GLM-4.5 with experts, differ by configuration, not by files.
//! 4. A parameter is named and carries its own shard rule; every way to set it goes through `ShardRule::slice`.
//! 5. No lock, static or global holds serving state: the engine thread owns all of it. Only [`config`] reads the
//!    environment.
//! 6. A request gets exactly one terminal event, and its blocks are freed even if its client disconnects.
//! 7. KV computed under one policy can be found only by that policy: the hash chain of the prefix cache starts from the
//!    policy's epoch, a number that is never used twice (its version may be), and the resident adapter's generation.
//! 8. A sequence's tokens and log-probabilities are the same bits alone or in any batch, with whole or chunked prefill,
//!    cache hit or miss, preempted or not, with drafts or without, sampled or scored, and for `--tp` 1, 2 and 4 where
//!    the split reductions (attention width, intermediate size) are multiples of 8: every kernel's reduction order
//!    depends on nothing but the row's own inputs.
//! 9. A sample depends only on (seed, prompt, sampling parameters, weights), never on other requests.
//! 10. Every large allocation is a reservation in the [`memory::MemoryBudget`] before it is made.
//! 11. Each queue has a limit, with its reason beside it.
//! 12. No request ends the process: a panic while a request is answered ends that request only. A panic in a step ends
//!     the process, because all requests use the state that it leaves half changed.
//! 13. All bytes that a client makes the server hold (messages as they arrive, texts to encode, tokens and texts of
//!     samples, unread replies) are counted in [`memory::Traffic`] before they are held, within the ledger's entry for
//!     traffic. A request whose reader lags is suspended.
//! 14. The weights change only between two steps, and only by an order that was checked before. Until then a push has
//!     changed nothing but the ledger. (In place: from the first write on, the weights are missing and nothing steps.)
//! 15. If there is a token file, a call's token is checked before any of its message is received, by one table of roles
//!     for each of gRPC and HTTP. A method or route without a role fails a test.

// Only the kernels' unit tests know devices. With a device's feature, those of this crate would be compiled a second
// time, which takes longer than everything that `make cuda-test` needs.
#![cfg(not(all(test, feature = "cuda")))]

pub mod cache;
pub mod clock;
pub mod comm;
pub mod config;
pub mod engine;
pub mod error;
pub mod executor;
pub mod grammar;
pub mod logs;
pub mod memory;
pub mod model;
pub mod observe;
pub mod pixels;
pub mod profile;
pub mod scheduler;
pub mod server;
pub mod stacks;
pub mod startup;
pub mod text;
pub mod types;
pub mod weights;
