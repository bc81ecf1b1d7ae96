//! rollout-server: a rollout inference server for RL fine-tuning.
//!
//! This page is the architecture: how a request travels, which layer knows what, and what always holds.
//!
//! # How a request travels
//!
//! ```text
//!  client ──gRPC──> server ──Command──> engine ──StepPlan──> executor ── rank 0: device, weights, KV, model
//!                   (tokio)  bounded    (one               (one thread ─ rank 1
//!                      ^     channel     thread)             a rank)    ─ rank tp-1
//!                      └──────Event───────┘ <──StepOutput──────┘
//! ```
//!
//! 1. [`server`] parses the request into valid types at the door (`server::convert`) and sends a [`engine::Command`].
//! 2. [`engine`] adds each prompt with its samples as a group to the [`scheduler`].
//! 3. Each `step()`: `schedule → launch → collect → update → emit`. The scheduler decides, as plain data (a
//!    [`types::StepPlan`]), which tokens of which sequences run; the [`executor`]'s ranks run them and sample; the
//!    scheduler takes note; the engine emits events.
//! 4. A sample ends by a stop rule, by a stop string, by abort or because its client is gone. Its blocks go back at
//!    once. When all samples of a request have ended it gets its one terminal event.
//!
//! # How a policy changes
//!
//! A push is a transaction: the [`engine`] reserves its memory, [`weights`]' `Receiver` takes and verifies it beside the
//! weights that serve while generation goes on, and at its commit the engine gives the [`executor`] one order between
//! two steps. A complete set of weights is packed as it comes into shadow weights, storage of the same shapes that the
//! executor gave for it; its commit exchanges the two. The request's `RunningPolicy` says what becomes of requests that
//! run. What is merged is merged into the base, never on top of the last adapter. Pause, sleep and wake are states of the
//! engine; [`engine`] says which command is taken in which.
//!
//! # Layers
//!
//! A module uses only modules to the right of it (`tests/structure` fails on any other edge):
//!
//! ```text
//! main, startup → server → engine → scheduler, executor → cache | model → weights, text → comm, memory
//!   → types, config, logs, profile → error
//! ```
//!
//! The crate `rollout-kernels` below all of them holds the operators. [`profile`] sums the trace-level spans of both. No
//! two files name each other in a circle.
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
//!    cache hit or miss, preempted or not, with drafts or without, sampled or scored, and for `--tp` 1, 2 and 4 where the
//!    split reductions (attention width, intermediate size) are multiples of 8: every kernel's reduction order depends
//!    on nothing but the row's own inputs.
//! 9. A sample depends only on (seed, prompt, sampling parameters, weights), never on what else runs.
//! 10. Every large allocation is a reservation in the [`memory::MemoryBudget`] before it is made.
//! 11. Each queue has a limit, with its reason beside it.
//! 12. No request ends the process: a panic while one is answered ends that one. What a panic in a step leaves half done
//!     is used by all requests, and ends the process.
//! 13. What a client makes the server hold (its messages as they arrive, texts that are encoded, tokens of its samples,
//!     replies that it has not read) is counted in [`memory::Traffic`], below the ledger's entry for it, before it is
//!     held; a request whose reader lags is held back.
//! 14. The weights change only between two steps, and only by an order that was checked before: until then a push has
//!     touched nothing but the ledger (in place: from its first write on the weights are missing, and nothing steps).

pub mod cache;
pub mod comm;
pub mod config;
pub mod engine;
pub mod error;
pub mod executor;
pub mod logs;
pub mod memory;
pub mod model;
pub mod profile;
pub mod scheduler;
pub mod server;
pub mod startup;
pub mod text;
pub mod types;
pub mod weights;
