//! The server behind its ports: its gRPC surface with the test as the engine, and hostile calls of every method.

mod fuzz;
mod grpc;
