//! Compiles `proto/` without protoc: protox makes the descriptor set, tonic-prost-build the services.

use prost::Message as _;

fn main() -> Result<(), Box<dyn std::error::Error>> {
    println!("cargo:rerun-if-changed=proto");
    #[expect(clippy::disallowed_methods, reason = "cargo tells a build script its directory only this way")]
    let out = std::path::PathBuf::from(std::env::var("OUT_DIR")?);
    let files = ["rollout/v1/rollout.proto", "rollout/v1/weights.proto", "rollout/v1/control.proto"];
    let descriptors = protox::compile(files, ["proto"])?;
    std::fs::write(out.join("rollout_descriptor.bin"), descriptors.encode_to_vec())?;
    let mut config = tonic_prost_build::configure();
    // HTTP answers with these messages too, as JSON without the members of a span that are zero.
    for message in ["GetTimelineResponse", "Span", "PhaseTime"] {
        config =
            config.type_attribute(format!(".rollout.v1.{message}"), "#[derive(serde::Serialize, utoipa::ToSchema)]");
    }
    let optional = "end steps computed_tokens sampled_tokens weight_version bytes push level parts";
    for field in optional.split(' ') {
        let path = format!(".rollout.v1.Span.{field}");
        config = config.field_attribute(path, r#"#[serde(skip_serializing_if = "is_default")]"#);
    }
    config
        // The data of a chunk of weights stays in the buffer of its message, without a copy.
        .bytes(".rollout.v1.Chunk.data")
        // Most prompts have none, and a request may have tens of thousands of prompts.
        .boxed(".rollout.v1.Prompt.sampling")
        .compile_fds(descriptors)?;
    Ok(())
}
