//! The names under which trainers send parameters, and the parameters that they mean.

use crate::weights::Parameters;

/// What FSDP, torch.compile and activation checkpointing put around a module, and PEFT's name for what it wraps.
const WRAPPERS: [&str; 4] = ["_fsdp_wrapped_module", "_orig_mod", "_checkpoint_wrapped_module", "base_layer"];
/// Projections that some trainers keep in one matrix, one below the other.
const FUSED: [(&str, &[&str]); 2] =
    [("qkv_proj", &["q_proj", "k_proj", "v_proj"]), ("gate_up_proj", &["gate_proj", "up_proj"])];
/// Buffers that some trainers send with the parameters; the configuration says what is in them.
const BUFFERS: [&str; 1] = ["rotary_emb.inv_freq"];
const HEAD: &str = "lm_head.weight";
pub(super) const EMBEDDING: &str = "model.embed_tokens.weight";

/// What a tensor is to the model.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(super) struct Target {
    /// The parameters that it brings; none for a buffer that the model does not need.
    pub parts: Vec<Part>,
    /// That it must have; None for such a buffer.
    pub shape: Option<Vec<usize>>,
    /// The head of a model whose head is the embedding.
    pub tied_head: bool,
}

/// A parameter inside a tensor.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct Part {
    pub parameter: String,
    /// The tensor's row in which it starts.
    pub first_row: usize,
}

impl Target {
    pub fn is_fused(&self) -> bool {
        self.parts.len() > 1
    }
}

/// The parameters that a tensor of this name brings; None if the model has no such thing.
pub(super) fn resolve(name: &str, parameters: &Parameters) -> Option<Target> {
    let name = plain_name(name);
    if BUFFERS.iter().any(|buffer| name.ends_with(buffer)) {
        return Some(Target::default());
    }
    let tied_head = name == HEAD && parameters.tied_head();
    let own = if tied_head { EMBEDDING } else { &name };
    if let Some(spec) = parameters.get(own) {
        let part = Part { parameter: spec.name.clone(), first_row: 0 };
        return Some(Target { parts: vec![part], shape: Some(spec.shape.clone()), tied_head });
    }
    fused(&name, parameters)
}

/// The name without what wrappers add to it.
fn plain_name(name: &str) -> String {
    let segments: Vec<&str> = name.split('.').filter(|segment| !WRAPPERS.contains(segment)).collect();
    let mut rest = &segments[..];
    while let ["module", inner @ ..] | ["base_model", "model", inner @ ..] = rest {
        rest = inner;
    }
    rest.join(".")
}

fn fused(name: &str, parameters: &Parameters) -> Option<Target> {
    let (module, kind) = name.rsplit_once('.')?;
    let (block, fused) = module.rsplit_once('.')?;
    let (_, projections) = FUSED.iter().find(|(name, _)| *name == fused)?;
    let mut target = Target::default();
    let mut rows = 0;
    for projection in *projections {
        let spec = parameters.get(&format!("{block}.{projection}.{kind}"))?;
        let (&own_rows, rest) = spec.shape.split_first()?;
        target.parts.push(Part { parameter: spec.name.clone(), first_row: rows });
        rows += own_rows;
        target.shape = Some([&[rows], rest].concat());
    }
    Some(target)
}

/// Elements of the largest tensor that can be sent, fused ones among them.
pub(super) fn largest(parameters: &Parameters) -> usize {
    let elements = |shape: &[usize]| shape.iter().product::<usize>();
    let whole = |name: &str| {
        let fused = FUSED.iter().filter_map(|(fused, projections)| {
            let name = name.replace(&format!(".{}.", projections[0]), &format!(".{fused}."));
            resolve(&name, parameters)?.shape
        });
        fused.map(|shape| elements(&shape)).max().unwrap_or(0)
    };
    parameters.iter().map(|spec| elements(&spec.shape).max(whole(&spec.name))).max().unwrap_or(0)
}

/// The known name with the longest beginning and end in common, if that is most of it.
pub(super) fn nearest<'a>(name: &str, parameters: &'a Parameters) -> Option<&'a str> {
    let name = plain_name(name);
    let common = |known: &str| {
        let start = known.bytes().zip(name.bytes()).take_while(|(a, b)| a == b).count();
        let end = known.bytes().rev().zip(name.bytes().rev()).take_while(|(a, b)| a == b).count();
        (start + end).min(known.len())
    };
    let known = parameters.iter().map(|spec| spec.name.as_str()).max_by_key(|known| common(known))?;
    (common(known) * 4 >= known.len() * 3).then_some(known)
}
