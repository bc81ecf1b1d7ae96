//! rollout-server: a rollout inference server for RL fine-tuning.
//!
//! This page is the architecture: how a request travels, how a policy changes, which layer knows what, and what always
//! holds.
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
//! 1. [`server`] parses the request into valid types (`server::convert`) and sends a [`engine::Command`]. It serves
//!    gRPC (`server::grpc`) and HTTP (`server::http`). An HTTP body becomes the protobuf message that gRPC's clients
//!    send, so that every check and default is there once; each makes its own answers of the engine's events.
//! 2. [`engine`] adds each prompt with its samples as a group to the [`scheduler`].
//! 3. Each `step()`: `schedule → launch → collect → update`. The scheduler decides, as plain data (a
//!    [`types::StepPlan`]), which tokens of which sequences run; the [`executor`]'s ranks run them and sample; the
//!    scheduler takes note. The engine emits the events of a step while the ranks compute the next one.
//! 4. A sample ends by a stop rule, by a stop string, by abort or because its client is gone. Its blocks go back at
//!    once. When all samples of a request have ended it gets its one terminal event.
//!
//! # How a policy changes
//!
//! A push is a transaction: the [`engine`] reserves its memory, [`weights`]' `Receiver` takes and verifies it beside
//! the weights that serve while generation goes on, and at its commit the engine gives the [`executor`] one order
//! between two steps. The request's `RunningPolicy` says what becomes of requests that run. What is merged is merged
//! into the base, never on top of the last adapter. Pause, sleep and wake are states of the engine; [`engine`] says
//! which command is taken in which.
//!
//! # Four walks
//!
//! Each goes straight down through the layers. A line names the function and, where its module does not tell, the file.
//!
//! A request, from the client to the sampler and back:
//!
//! ```text
//! server    grpc::rollout            generate: deadline, and an end when the client vanishes
//!           convert::generate        the message becomes a valid request, its texts token ids
//! engine    receive (admission.rs)   accepted, or held while the server is paused or the policy is too old
//! scheduler schedule                 a StepPlan; prefix blocks are hashed in cache::hash and found in cache::manager
//! executor  Ranks::launch            every rank gets the plan
//!           ModelRunner::run         FlatBatch: rows, positions, slots, tasks; Ops::prepare makes one Step of them
//! model     Decoder::forward         layer by layer in Ops: embed, linear, rope, write_kv, paged_attention
//!           Decoder::logits          of the rows that have tasks
//! kernels   Ops::sample              a token and both log-probabilities for each task, read once when all are sampled
//! scheduler update                   takes note of the tokens, finishes samples, gives blocks back
//! engine    emit                     events to the request's stream, with the text that the tokens make (text.rs)
//! ```
//!
//! A pushed LoRA tensor, to the matrix:
//!
//! ```text
//! server    grpc::weights            Update: chunks as they arrive
//! weights   push::Receiver::write    Receipt::gather keeps the tensor and verifies it (push::verify)
//!           push::Receiver::finish   PushedAdapter::build: an Adapter, one WeightChange for each parameter
//! engine    apply_lora (update.rs)   WeightOrder::Merge between two steps
//! executor  RankWeights::merge       every parameter that the old or the new adapter touches
//!           LocalParameter::merge    the base: the checkpoint, or the copy of what a push has replaced
//! kernels   Ops::merge_rows          base + scaling * b a, rounded once, written to the matrix (cpu/merge.rs)
//! ```
//!
//! A tensor of a full push, to the matrix:
//!
//! ```text
//! engine    begin (update.rs)        Executor::shadow_weights: storage of the serving weights' shapes beside them
//! server    grpc::weights            Update: chunks as they arrive
//! weights   push::Receiver::write    Receipt::stream: rows in order, digested and checked on the way (push::verify)
//!           ShadowTensor::write_rows each rank's part of the rows
//! kernels   Matrix::write_columns    packed as the device stores it
//! weights   push::Receiver::finish   every tensor is whole and verified
//! engine    apply_packed             Executor::exchange between two steps
//! executor  RankWeights::exchange    the shadow's matrices serve, those that served are the next push's shadow
//! ```
//!
//! A sleep, to the freed memory:
//!
//! ```text
//! server    grpc::control            Sleep
//! engine    sleep (sleep.rs)         waits for requests, ends or keeps them; then releases in this order:
//! executor  Ranks::release           KV cache, then workspace; the devices measure what they have back
//!           Ranks::discard           the storage that the last full push left
//!           Ranks::release           weights
//! kernels   KvCache, Matrix::release the memory goes back to the system; restore takes it again at Wake
//! engine    sleep (sleep.rs)         the ledger is lowered, and the reply says what was measured
//! ```
//!
//! # Layers
//!
//! A module uses only modules to the right of it (`tests/structure` fails on any other edge):
//!
//! ```text
//! main, startup → server → engine → scheduler, executor → cache | model | grammar → weights, text, observe
//!   → comm, memory → types, clock, config, logs, profile → error
//! ```
//!
//! The crate [`rollout_kernels`] below all of them holds the devices: a closed set of backends behind one set of types,
//! `Device`, `Ops`, `Matrix`, `KvCache` and `Buffer`. No file here names a device. [`profile`] sums the trace-level
//! spans of both crates. No two files name each other in a circle.
//!
//! # How it is simulated
//!
//! The engine takes two things from outside: the time, from a [`clock::Clock`], and commands, whose answers and events
//! leave through closures. [`engine::Engine::turn`] is one iteration of its loop and never blocks. `tests/simulation`
//! runs the engine and the layers below it in one thread on a virtual clock, with random clients and faults, and
//! asserts the invariants after every turn ([`engine::Engine::check_integrity`]). It leaves out grammars, whose slow
//! masks are computed on a thread of their own ([`grammar::MaskQueue`]).
//!
//! # Invariants
//!
//! 1. [`scheduler`] and [`cache`] know no device, clock, channel or runtime. Only [`server`] (and `main`) knows tonic,
//!    prost and tokio.
//! 2. [`model`] never mentions a rank number, a device, LoRA or a file format. Tensor parallelism is in the layers'
//!    [`weights::ShardRule`]s and the [`comm::Communicator`].
//! 3. One text for every decoder family: Llama, Qwen2, Qwen3 and Mistral differ by configuration, not by files.
//! 4. A parameter is named and carries its own shard rule; every way to set it goes through `ShardRule::slice`.
//! 5. No lock, static or global holds serving state: the engine thread owns all of it. Only [`config`] reads the
//!    environment.
//! 6. A request gets exactly one terminal event; its blocks go back even if its client vanishes.
//! 7. KV computed under one policy can be found only by that policy: the hash chain of the prefix cache starts from the
//!    policy's epoch, a number that is never used twice (its version may be), and the resident adapter's generation.
//! 8. A sequence's tokens and log-probabilities are the same bits alone or in any batch, with whole or chunked prefill,
//!    cache hit or miss, preempted or not, with drafts or without, sampled or scored, and for `--tp` 1, 2 and 4 where
//!    the split reductions (attention width, intermediate size) are multiples of 8: every kernel's reduction order
//!    depends on nothing but the row's own inputs.
//! 9. A sample depends only on (seed, prompt, sampling parameters, weights), never on what else runs.
//! 10. Every large allocation is a reservation in the [`memory::MemoryBudget`] before it is made.
//! 11. Each queue has a limit, with its reason beside it.
//! 12. No request ends the process: a panic while one is answered ends that one. What a panic in a step leaves half
//!     done is used by all requests, and ends the process.
//! 13. What a client makes the server hold (its messages as they arrive, texts that are encoded, tokens and texts of
//!     its samples, replies that it has not read) is counted in [`memory::Traffic`], below the ledger's entry for it,
//!     before it is held; a request whose reader lags is suspended.
//! 14. The weights change only between two steps, and only by an order that was checked before: until then a push has
//!     touched nothing but the ledger (in place: from its first write on the weights are missing, and nothing steps).
//! 15. Where there is a token file, a call's token is checked before any of its message is received, by one table of
//!     roles for gRPC and HTTP; a method or route without a role fails a test.

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
pub mod profile;
pub mod scheduler;
pub mod server;
pub mod startup;
pub mod text;
pub mod types;
pub mod weights;
