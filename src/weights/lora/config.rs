//! PEFT's `adapter_config.json`: the fields that decide a merge, and those that are refused.

use std::fmt;

use serde::de::{Deserialize, Deserializer, MapAccess, SeqAccess, Visitor};

use super::patterns::Patterns;
use crate::error::{Error, Result};
use crate::memory::{Charge, Traffic};

/// Fields that change what the adapter computes; each must be unset.
const UNSUPPORTED: [&str; 10] = [
    "alora_invocation_tokens",
    "arrow_config",
    "kasa_config",
    "layer_replication",
    "megatron_config",
    "monteclora_config",
    "trainable_token_indices",
    "use_bdlora",
    "use_qalora",
    "velora_config",
];
/// Ends of the names in `target_parameters`: experts and their router.
const TARGET_PARAMETERS: [&str; 3] = ["gate_up_proj", "down_proj", "gate.weight"];
/// Beginnings of the values of `init_lora_weights` with which the trainer adapts another base than the checkpoint, or
/// PEFT rounds the merge in another way.
const OTHER_BASES: [&str; 6] = ["pissa", "corda", "olora", "loftq", "lora_ga", "mica"];
/// Memory for each byte of the text as fields. Lists of short lists take the most: 52 bytes.
const FIELD_BYTES: u64 = 64;

/// The fields of PEFT's `LoraConfig` that decide a merge. Fields that are missing have PEFT's defaults.
pub(super) struct AdapterConfig {
    rank: u32,
    alpha: f64,
    rank_pattern: Patterns<u32>,
    alpha_pattern: Patterns<f64>,
    rank_stabilised: bool,
    pub dora: bool,
    /// Whether `lora_B` has a bias.
    pub lora_bias: bool,
    pub bias: TrainedBias,
    pub modules_to_save: Vec<String>,
    /// Whether a head that is the embedding stays so where `modules_to_save` names either.
    pub ensure_weight_tying: bool,
    /// Counts what the configuration takes, and what reading it has taken.
    _charge: Charge,
}

/// Which of the base's biases the adapter replaces: the field `bias`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum TrainedBias {
    None,
    /// Those of the layers that have factors (`lora_only`).
    Adapted,
    All,
}

impl AdapterConfig {
    /// Reads the text of `adapter_config.json`. The memory for that is counted in `traffic` before.
    ///
    /// # Errors
    /// `InvalidArgument` naming the field that is wrong or not supported; `ResourceExhausted` if there is no memory to
    /// read it.
    pub fn parse(json: &str, traffic: &Traffic) -> Result<Self> {
        let mut charge = traffic.charge(json.len() as u64 * FIELD_BYTES)?;
        let fields: Field = serde_json::from_str(json)
            .map_err(|e| Error::invalid("adapter_config", format!("not the JSON of adapter_config.json: {e}")))?;
        let fields = Fields::of(&fields)?;
        fields.refuse_unsupported()?;
        let other = |name: &&String| !TARGET_PARAMETERS.iter().any(|end| name.ends_with(end));
        if let Some(name) = fields.texts("target_parameters")?.iter().find(other) {
            let message = format!("{name:?} is not a parameter of experts or of their router; name modules instead");
            return Err(bad("target_parameters", message));
        }
        Ok(Self {
            rank: fields.get("r").map_or(Ok(8), |r| rank("r", r))?,
            alpha: fields.get("lora_alpha").map_or(Ok(8.0), |alpha| number("lora_alpha", alpha))?,
            rank_pattern: fields.patterns("rank_pattern", rank, &mut charge)?,
            alpha_pattern: fields.patterns("alpha_pattern", number, &mut charge)?,
            rank_stabilised: fields.flag("use_rslora")?,
            dora: fields.flag("use_dora")?,
            lora_bias: fields.flag("lora_bias")?,
            bias: fields.bias()?,
            modules_to_save: fields.texts("modules_to_save")?,
            ensure_weight_tying: fields.flag("ensure_weight_tying")?,
            _charge: charge,
        })
    }

    /// The rank of the module with this name in the base model. The first pattern that matches wins.
    pub fn rank(&self, module: &str) -> u32 {
        self.rank_pattern.get(module).unwrap_or(self.rank)
    }

    /// The scaling of the module with this name: computed in float64 as Python does, then rounded to float32 as PyTorch
    /// rounds a scalar that multiplies a float32 tensor.
    ///
    /// # Errors
    /// `InvalidArgument` if it is not finite in float32.
    pub fn scaling(&self, module: &str) -> Result<f32> {
        let rank = f64::from(self.rank(module));
        let alpha = self.alpha_pattern.get(module).unwrap_or(self.alpha);
        let scaling = (alpha / if self.rank_stabilised { rank.sqrt() } else { rank }) as f32;
        if !scaling.is_finite() {
            return Err(bad("lora_alpha", format!("{alpha} of {module} is beyond float32; give a smaller one")));
        }
        Ok(scaling)
    }
}

fn bad(field: &str, message: String) -> Error {
    Error::invalid(format!("adapter_config.{field}"), message)
}

/// The fields of the configuration that are not null.
struct Fields<'a>(&'a [(String, Field)]);

impl<'a> Fields<'a> {
    fn of(field: &'a Field) -> Result<Self> {
        match field {
            Field::Table(entries) => Ok(Self(entries)),
            other => Err(Error::invalid("adapter_config", format!("{other} is no adapter_config.json"))),
        }
    }

    /// The value of a field, unless it is null. Of several with one name the last counts, as in Python.
    fn get(&self, name: &str) -> Option<&'a Field> {
        let field = self.0.iter().rev().find(|(key, _)| key == name).map(|(_, field)| field);
        field.filter(|field| !matches!(field, Field::Null))
    }

    fn refuse_unsupported(&self) -> Result<()> {
        match self.get("peft_type") {
            Some(Field::Text(kind)) if kind == "LORA" => {}
            other => {
                let other = other.map_or("missing".to_string(), Field::to_string);
                return Err(bad("peft_type", format!("{other}; only \"LORA\" is supported")));
            }
        }
        for name in UNSUPPORTED {
            if let Some(field) = self.get(name).filter(|field| !field.is_empty()) {
                return Err(bad(name, format!("{field} is not supported; train without it, or push FULL weights")));
            }
        }
        match self.get("init_lora_weights") {
            Some(Field::Text(init)) if OTHER_BASES.iter().any(|start| init.to_lowercase().starts_with(start)) => {
                let message = format!(
                    "\"{init}\" adapts another base than the checkpoint; convert the adapter \
                     (path_initial_model_for_weight_conversion), or push FULL weights"
                );
                Err(bad("init_lora_weights", message))
            }
            _ => Ok(()),
        }
    }

    fn flag(&self, name: &str) -> Result<bool> {
        match self.get(name) {
            None => Ok(false),
            Some(Field::Bool(flag)) => Ok(*flag),
            Some(other) => Err(bad(name, format!("{other} is not true or false"))),
        }
    }

    fn bias(&self) -> Result<TrainedBias> {
        match self.get("bias") {
            None => Ok(TrainedBias::None),
            Some(Field::Text(bias)) if bias == "none" => Ok(TrainedBias::None),
            Some(Field::Text(bias)) if bias == "lora_only" => Ok(TrainedBias::Adapted),
            Some(Field::Text(bias)) if bias == "all" => Ok(TrainedBias::All),
            Some(other) => Err(bad("bias", format!("{other} is not \"none\", \"lora_only\" or \"all\""))),
        }
    }

    fn texts(&self, name: &str) -> Result<Vec<String>> {
        let wrong = |field: &Field| bad(name, format!("{field} is no list of names"));
        match self.get(name) {
            None => Ok(Vec::new()),
            Some(Field::List(items)) => items
                .iter()
                .map(|item| match item {
                    Field::Text(text) if !text.is_empty() => Ok(text.clone()),
                    _ => Err(wrong(item)),
                })
                .collect(),
            Some(other) => Err(wrong(other)),
        }
    }

    /// The module patterns of a table with their values.
    fn patterns<T: Copy>(
        &self,
        name: &str,
        value: impl Fn(&str, &Field) -> Result<T>,
        charge: &mut Charge,
    ) -> Result<Patterns<T>> {
        let entries: &[(String, Field)] = match self.get(name) {
            None => &[],
            Some(Field::Table(entries)) => entries,
            Some(other) => return Err(bad(name, format!("{other} is no table of module names"))),
        };
        let table = entries.iter().map(|(key, field)| Ok((key.as_str(), value(&format!("{name}.{key}"), field)?)));
        Patterns::new(name, table.collect::<Result<_>>()?, charge)
    }
}

fn rank(name: &str, field: &Field) -> Result<u32> {
    match field {
        Field::Number(x) if x.fract() == 0.0 && (1.0..=f64::from(u32::MAX)).contains(x) => Ok(*x as u32),
        other => Err(bad(name, format!("{other} is no rank; it is a whole number from 1"))),
    }
}

fn number(name: &str, field: &Field) -> Result<f64> {
    match field {
        Field::Number(x) => Ok(*x),
        other => Err(bad(name, format!("{other} is no number"))),
    }
}

/// A JSON value whose tables keep their order, because the first pattern that matches wins.
enum Field {
    Null,
    Bool(bool),
    Number(f64),
    Text(String),
    List(Vec<Field>),
    Table(Vec<(String, Field)>),
}

impl Field {
    /// Whether Python would take the value for false.
    fn is_empty(&self) -> bool {
        match self {
            Self::Null => true,
            Self::Bool(flag) => !flag,
            Self::Number(x) => *x == 0.0,
            Self::Text(text) => text.is_empty(),
            Self::List(items) => items.is_empty(),
            Self::Table(entries) => entries.is_empty(),
        }
    }
}

impl fmt::Display for Field {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Null => write!(f, "null"),
            Self::Bool(flag) => write!(f, "{flag}"),
            Self::Number(x) => write!(f, "{x}"),
            Self::Text(text) => write!(f, "{text:?}"),
            Self::List(_) => write!(f, "a list"),
            Self::Table(_) => write!(f, "a table"),
        }
    }
}

impl<'de> Deserialize<'de> for Field {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> std::result::Result<Self, D::Error> {
        struct AnyField;

        impl<'de> Visitor<'de> for AnyField {
            type Value = Field;

            fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                write!(f, "JSON")
            }

            fn visit_unit<E>(self) -> std::result::Result<Field, E> {
                Ok(Field::Null)
            }

            fn visit_bool<E>(self, flag: bool) -> std::result::Result<Field, E> {
                Ok(Field::Bool(flag))
            }

            fn visit_i64<E>(self, x: i64) -> std::result::Result<Field, E> {
                Ok(Field::Number(x as f64))
            }

            fn visit_u64<E>(self, x: u64) -> std::result::Result<Field, E> {
                Ok(Field::Number(x as f64))
            }

            fn visit_f64<E>(self, x: f64) -> std::result::Result<Field, E> {
                Ok(Field::Number(x))
            }

            fn visit_str<E>(self, text: &str) -> std::result::Result<Field, E> {
                Ok(Field::Text(text.to_string()))
            }

            fn visit_seq<A: SeqAccess<'de>>(self, mut seq: A) -> std::result::Result<Field, A::Error> {
                let mut items = Vec::new();
                while let Some(item) = seq.next_element()? {
                    items.push(item);
                }
                Ok(Field::List(items))
            }

            fn visit_map<A: MapAccess<'de>>(self, mut map: A) -> std::result::Result<Field, A::Error> {
                let mut entries = Vec::new();
                while let Some(entry) = map.next_entry()? {
                    entries.push(entry);
                }
                Ok(Field::Table(entries))
            }
        }

        deserializer.deserialize_any(AnyField)
    }
}
