//! Names of an adapter's tensors, as `save_pretrained` and `state_dict` write them.

/// What every name starts with.
pub(super) const PREFIX: &str = "base_model.model.";

/// What a tensor is to its module.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(super) enum Part {
    A,
    B,
    BiasOfB,
    EmbeddingA,
    EmbeddingB,
    Magnitude,
    /// The base's own, beside an adapter.
    BaseWeight,
    BaseBias,
    /// Whole new ones.
    Weight,
    Bias,
}

/// A name taken apart.
#[derive(Debug, PartialEq, Eq)]
pub(super) struct TensorName<'a> {
    /// In the base model, for example `model.layers.0.self_attn.q_proj`.
    pub module: String,
    /// Which `state_dict` writes and `save_pretrained` leaves out.
    pub adapter: Option<&'a str>,
    pub part: Part,
}

impl<'a> TensorName<'a> {
    /// None if PEFT writes no such name.
    pub fn parse(name: &'a str) -> Option<Self> {
        let segments: Vec<&str> = name.strip_prefix(PREFIX)?.split('.').collect();
        let (module, adapter, part): (&[&str], _, _) = match segments.as_slice() {
            [module @ .., "lora_A", "weight"] => (module, None, Part::A),
            [module @ .., "lora_A", adapter, "weight"] => (module, Some(*adapter), Part::A),
            [module @ .., "lora_B", "weight"] => (module, None, Part::B),
            [module @ .., "lora_B", adapter, "weight"] => (module, Some(*adapter), Part::B),
            [module @ .., "lora_B", "bias"] => (module, None, Part::BiasOfB),
            [module @ .., "lora_B", adapter, "bias"] => (module, Some(*adapter), Part::BiasOfB),
            [module @ .., "lora_embedding_A"] => (module, None, Part::EmbeddingA),
            [module @ .., "lora_embedding_A", adapter] => (module, Some(*adapter), Part::EmbeddingA),
            [module @ .., "lora_embedding_B"] => (module, None, Part::EmbeddingB),
            [module @ .., "lora_embedding_B", adapter] => (module, Some(*adapter), Part::EmbeddingB),
            [module @ .., "lora_magnitude_vector"] | [module @ .., "lora_magnitude_vector", "weight"] => {
                (module, None, Part::Magnitude)
            }
            [module @ .., "lora_magnitude_vector", adapter]
            | [module @ .., "lora_magnitude_vector", adapter, "weight"] => (module, Some(*adapter), Part::Magnitude),
            [module @ .., "base_layer", "weight"] => (module, None, Part::BaseWeight),
            [module @ .., "base_layer", "bias"] => (module, None, Part::BaseBias),
            [module @ .., "weight"] => return Self::saved(module, Part::Weight),
            [module @ .., "bias"] => return Self::saved(module, Part::Bias),
            _ => return None,
        };
        Self::of(module.join("."), adapter, part)
    }

    /// A whole tensor; `modules_to_save.<adapter>` may stand behind any module of the path.
    fn saved(module: &[&'a str], part: Part) -> Option<Self> {
        match module.iter().position(|segment| *segment == "modules_to_save") {
            None => Self::of(module.join("."), None, part),
            Some(at) => {
                let adapter = *module.get(at + 1)?;
                let path: Vec<&str> = [&module[..at], &module[at + 2..]].concat();
                Self::of(path.join("."), Some(adapter), part)
            }
        }
    }

    fn of(module: String, adapter: Option<&'a str>, part: Part) -> Option<Self> {
        (!module.is_empty()).then_some(Self { module, adapter, part })
    }
}
