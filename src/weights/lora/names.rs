//! The names of an adapter's tensors, as PEFT's `save_pretrained` and `state_dict` write them.

/// The beginning of the name of every tensor of an adapter.
pub(super) const PREFIX: &str = "base_model.model.";

/// The role of a tensor of an adapter in the module that it belongs to.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(super) enum TensorRole {
    A,
    B,
    /// The bias of `lora_B`.
    BiasOfB,
    EmbeddingA,
    EmbeddingB,
    /// DoRA's `lora_magnitude_vector`.
    Magnitude,
    /// The base's own weight, which `state_dict` writes beside the factors.
    BaseWeight,
    /// The base's own bias, which `state_dict` writes beside the factors.
    BaseBias,
    /// A new weight of the whole module.
    Weight,
    /// A new bias of the whole module.
    Bias,
}

/// The name of an adapter's tensor, taken apart.
#[derive(Debug, PartialEq, Eq)]
pub(super) struct TensorName<'a> {
    /// The module's name in the base model, for example `model.layers.0.self_attn.q_proj`.
    pub module: String,
    /// The adapter's name, which `state_dict` writes and `save_pretrained` leaves out.
    pub adapter: Option<&'a str>,
    pub role: TensorRole,
}

impl<'a> TensorName<'a> {
    /// Takes a name apart; `None` if PEFT writes no such name.
    pub fn parse(name: &'a str) -> Option<Self> {
        let segments: Vec<&str> = name.strip_prefix(PREFIX)?.split('.').collect();
        let (module, adapter, role): (&[&str], _, _) = match segments.as_slice() {
            [module @ .., "lora_A", "weight"] => (module, None, TensorRole::A),
            [module @ .., "lora_A", adapter, "weight"] => (module, Some(*adapter), TensorRole::A),
            [module @ .., "lora_B", "weight"] => (module, None, TensorRole::B),
            [module @ .., "lora_B", adapter, "weight"] => (module, Some(*adapter), TensorRole::B),
            [module @ .., "lora_B", "bias"] => (module, None, TensorRole::BiasOfB),
            [module @ .., "lora_B", adapter, "bias"] => (module, Some(*adapter), TensorRole::BiasOfB),
            [module @ .., "lora_embedding_A"] => (module, None, TensorRole::EmbeddingA),
            [module @ .., "lora_embedding_A", adapter] => (module, Some(*adapter), TensorRole::EmbeddingA),
            [module @ .., "lora_embedding_B"] => (module, None, TensorRole::EmbeddingB),
            [module @ .., "lora_embedding_B", adapter] => (module, Some(*adapter), TensorRole::EmbeddingB),
            [module @ .., "lora_magnitude_vector"] | [module @ .., "lora_magnitude_vector", "weight"] => {
                (module, None, TensorRole::Magnitude)
            }
            [module @ .., "lora_magnitude_vector", adapter]
            | [module @ .., "lora_magnitude_vector", adapter, "weight"] => {
                (module, Some(*adapter), TensorRole::Magnitude)
            }
            [module @ .., "base_layer", "weight"] => (module, None, TensorRole::BaseWeight),
            [module @ .., "base_layer", "bias"] => (module, None, TensorRole::BaseBias),
            [module @ .., "weight"] => return Self::saved(module, TensorRole::Weight),
            [module @ .., "bias"] => return Self::saved(module, TensorRole::Bias),
            _ => return None,
        };
        Self::of(module.join("."), adapter, role)
    }

    /// The name of a new weight or bias. `modules_to_save.<adapter>` may follow any module of the path.
    fn saved(module: &[&'a str], role: TensorRole) -> Option<Self> {
        match module.iter().position(|segment| *segment == "modules_to_save") {
            None => Self::of(module.join("."), None, role),
            Some(at) => {
                let adapter = *module.get(at + 1)?;
                let path: Vec<&str> = [&module[..at], &module[at + 2..]].concat();
                Self::of(path.join("."), Some(adapter), role)
            }
        }
    }

    fn of(module: String, adapter: Option<&'a str>, role: TensorRole) -> Option<Self> {
        (!module.is_empty()).then_some(Self { module, adapter, role })
    }
}
