//! An adapter's manifest against its configuration and the model.

use std::collections::{BTreeMap, BTreeSet};

use super::config::{AdapterConfig, TrainedBias};
use super::names::{PREFIX, Part, TensorName};
use super::plan::{AdapterPlan, Kind, PlannedChange, PlannedDelta, PlannedLowRank, PlannedWhole};
use crate::error::{Error, Result};
use crate::weights::parameters::{Dtype, Parameters, matrix_shape};
use crate::weights::push::TensorEntry;

const EMBEDDING: &str = "model.embed_tokens";
const HEAD: &str = "lm_head";

/// Tensors of one module: their indices in the manifest.
type Module = BTreeMap<Part, usize>;

impl AdapterPlan {
    /// Neither a configuration nor tensors: the base itself.
    ///
    /// # Errors
    /// `InvalidArgument` naming the tensor or the configuration's field that is unknown, missing, twice, of another
    /// shape, or not supported.
    pub fn new(config: &str, tensors: &[TensorEntry], parameters: &Parameters) -> Result<Self> {
        let changes = if config.trim().is_empty() && tensors.is_empty() {
            BTreeMap::new()
        } else {
            plan(config, tensors, parameters)?
        };
        Ok(Self { changes, serving: parameters.dtype() })
    }
}

/// What the adapter changes, by parameter.
///
/// # Errors
/// See [`AdapterPlan::new`](super::AdapterPlan::new).
fn plan(config: &str, tensors: &[TensorEntry], parameters: &Parameters) -> Result<BTreeMap<String, PlannedChange>> {
    let config = AdapterConfig::parse(config)?;
    if tensors.is_empty() {
        return Err(Error::invalid(
            "tensors",
            "adapter_config is given, but no tensors; give neither for the base itself",
        ));
    }
    let modules = group(tensors)?;
    let mut checker = Checker { config, tensors, parameters, changes: BTreeMap::new() };
    for (name, module) in &modules {
        checker.adapt(name, module)?;
    }
    checker.replace(&modules)?;
    Ok(checker.changes)
}

fn group(tensors: &[TensorEntry]) -> Result<BTreeMap<String, Module>> {
    let mut modules: BTreeMap<String, Module> = BTreeMap::new();
    let mut first_adapter = None;
    for (index, entry) in tensors.iter().enumerate() {
        let Some(TensorName { module, adapter, part }) = TensorName::parse(&entry.name) else {
            let message = format!(
                "not a name that PEFT gives to a tensor of a LoRA adapter ({PREFIX}<module>.lora_A.weight ...)"
            );
            return Err(Error::invalid(&entry.name, message));
        };
        if let Some(adapter) = adapter {
            let first = *first_adapter.get_or_insert(adapter);
            if first != adapter {
                let message = format!("is of the adapter {adapter:?}, others are of {first:?}; send one adapter");
                return Err(Error::invalid(&entry.name, message));
            }
        }
        if let Some(other) = modules.entry(module).or_default().insert(part, index) {
            return Err(Error::invalid(&entry.name, format!("is twice; the other is {}", tensors[other].name)));
        }
    }
    Ok(modules)
}

struct Checker<'a> {
    config: AdapterConfig,
    tensors: &'a [TensorEntry],
    parameters: &'a Parameters,
    changes: BTreeMap<String, PlannedChange>,
}

impl Checker<'_> {
    /// Takes in the factors of a module, if it has some.
    fn adapt(&mut self, name: &str, module: &Module) -> Result<()> {
        let linear = self.pair(name, module, (Part::A, "lora_A.weight"), (Part::B, "lora_B.weight"))?;
        let embedding =
            self.pair(name, module, (Part::EmbeddingA, "lora_embedding_A"), (Part::EmbeddingB, "lora_embedding_B"))?;
        match (linear, embedding) {
            (Some((a, _)), Some(_)) => {
                Err(self.wrong(a, "is of a module that has lora_embedding_A too; a module has one of them".into()))
            }
            (Some((a, b)), None) => self.adapt_linear(name, module, a, b),
            (None, Some((a, b))) => self.adapt_embedding(name, a, b),
            (None, None) => match module.get(&Part::Magnitude).or(module.get(&Part::BiasOfB)) {
                Some(&tensor) => Err(self.wrong(tensor, "has no lora_A and lora_B beside it".into())),
                None => Ok(()),
            },
        }
    }

    /// Both tensors or neither.
    fn pair(
        &self,
        name: &str,
        module: &Module,
        (first, first_name): (Part, &str),
        (second, second_name): (Part, &str),
    ) -> Result<Option<(usize, usize)>> {
        let missing = |missing: &str, there: usize| {
            Err(Error::invalid(
                format!("{PREFIX}{name}.{missing}"),
                format!("is missing; {} is there", self.name(there)),
            ))
        };
        match (module.get(&first), module.get(&second)) {
            (Some(&a), Some(&b)) => Ok(Some((a, b))),
            (Some(&a), None) => missing(second_name, a),
            (None, Some(&b)) => missing(first_name, b),
            (None, None) => Ok(None),
        }
    }

    fn adapt_linear(&mut self, name: &str, module: &Module, a: usize, b: usize) -> Result<()> {
        let (parameter, kind) = self.linear_weight(name, a)?;
        let (rows, cols) = self.matrix(&parameter, a)?;
        let rank = self.config.rank(name) as usize;
        self.expect_shape(a, &[rank, cols])?;
        self.expect_shape(b, &[rows, rank])?;
        let delta = self.same_dtype(a, b)?;
        let magnitude = self.magnitude(name, module, rows, delta)?;
        let scaling = self.config.scaling(name)?;
        self.adapt_bias(name, module, a, scaling)?;
        let roundings = Vec::from_iter((delta != Dtype::F32).then_some(delta));
        self.set_delta(
            &parameter,
            a,
            PlannedDelta::LowRank(PlannedLowRank { a, b, magnitude, rank, rows, cols, scaling, roundings, kind }),
        )
    }

    /// The parameter that an adapter of this linear layer changes.
    fn linear_weight(&self, name: &str, tensor: usize) -> Result<(String, Kind)> {
        if name == HEAD && self.parameters.tied_head() {
            return Ok((format!("{EMBEDDING}.weight"), Kind::TiedHead));
        }
        if name == EMBEDDING {
            let message = "is of the embedding, whose factors are lora_embedding_A and lora_embedding_B";
            return Err(self.wrong(tensor, message.into()));
        }
        Ok((format!("{name}.weight"), Kind::Linear))
    }

    fn magnitude(
        &self,
        name: &str,
        module: &Module,
        rows: usize,
        delta: Dtype,
    ) -> Result<Option<(usize, Dtype, Dtype)>> {
        match (module.get(&Part::Magnitude), self.config.dora) {
            (None, false) => Ok(None),
            (None, true) => Err(Error::invalid(
                format!("{PREFIX}{name}.lora_magnitude_vector"),
                "is missing, but adapter_config.use_dora is true",
            )),
            (Some(&tensor), false) => {
                Err(self.wrong(tensor, "is here, but adapter_config.use_dora is not true".into()))
            }
            (Some(&tensor), true) => {
                self.expect_shape(tensor, &[rows])?;
                let sum = promote(self.parameters.dtype(), delta);
                Ok(Some((tensor, sum, promote(self.tensors[tensor].dtype, sum))))
            }
        }
    }

    fn adapt_bias(&mut self, name: &str, module: &Module, a: usize, scaling: f32) -> Result<()> {
        let parameter = format!("{name}.bias");
        let rows = self.parameters.get(&parameter).map(|spec| matrix_shape(&spec.shape).0);
        match (module.get(&Part::BiasOfB), self.config.lora_bias) {
            (None, false) => Ok(()),
            (None, true) => Err(Error::invalid(
                format!("{PREFIX}{name}.lora_B.bias"),
                format!("is missing, but adapter_config.lora_bias is true and {} is there", self.name(a)),
            )),
            (Some(&tensor), false) => {
                Err(self.wrong(tensor, "is here, but adapter_config.lora_bias is not true".into()))
            }
            (Some(&tensor), true) => {
                let Some(rows) = rows else {
                    return Err(self.wrong(tensor, format!("cannot be merged: {name} has no bias in this model")));
                };
                self.expect_shape(tensor, &[rows])?;
                self.set_delta(&parameter, tensor, PlannedDelta::Bias { tensor, rows, scaling })
            }
        }
    }

    fn adapt_embedding(&mut self, name: &str, a: usize, b: usize) -> Result<()> {
        if name != EMBEDDING {
            return Err(self.wrong(a, format!("is not of {EMBEDDING}, the only embedding; linear layers have lora_A")));
        }
        if self.config.dora {
            return Err(self.wrong(a, "with adapter_config.use_dora: DoRA of an embedding is not supported".into()));
        }
        let parameter = format!("{EMBEDDING}.weight");
        let (rows, cols) = self.matrix(&parameter, a)?;
        let rank = self.config.rank(name) as usize;
        self.expect_shape(a, &[rank, rows])?;
        self.expect_shape(b, &[cols, rank])?;
        let scaling = self.config.scaling(name)?;
        // As PEFT has it, a delta of an embedding is rounded to the base's precision too before it is added.
        let mut roundings = vec![self.same_dtype(a, b)?, self.parameters.dtype()];
        roundings.dedup();
        roundings.retain(|dtype| *dtype != Dtype::F32);
        let (magnitude, kind) = (None, Kind::Embedding);
        self.set_delta(
            &parameter,
            a,
            PlannedDelta::LowRank(PlannedLowRank { a, b, magnitude, rank, rows, cols, scaling, roundings, kind }),
        )
    }

    fn set_delta(&mut self, parameter: &str, tensor: usize, delta: PlannedDelta) -> Result<()> {
        let change = self.changes.entry(parameter.to_string()).or_default();
        if change.delta.replace(delta).is_some() {
            let message = format!("{HEAD} and {EMBEDDING} are one matrix in this model; adapt one of them");
            return Err(self.wrong(tensor, message));
        }
        Ok(())
    }

    /// Takes in whole tensors: `modules_to_save`, biases, and the base's own, of which nothing is needed.
    fn replace(&mut self, modules: &BTreeMap<String, Module>) -> Result<()> {
        let mut expected = self.saved_parameters()?;
        expected.extend(self.trained_biases(modules));
        for (name, module) in modules {
            for part in [Part::Weight, Part::Bias, Part::BaseWeight, Part::BaseBias] {
                if let Some(&tensor) = module.get(&part) {
                    self.replace_one(name, module, (part, tensor), &expected)?;
                }
            }
        }
        let missing = expected.iter().find(|name| self.changes.get(*name).is_none_or(|change| change.whole.is_none()));
        match missing {
            Some(parameter) => Err(Error::invalid(
                format!("{PREFIX}{parameter}"),
                "is missing, but modules_to_save or bias of adapter_config name it",
            )),
            None => Ok(()),
        }
    }

    fn replace_one(
        &mut self,
        name: &str,
        module: &Module,
        (part, tensor): (Part, usize),
        expected: &BTreeSet<String>,
    ) -> Result<()> {
        let of_base = matches!(part, Part::BaseWeight | Part::BaseBias);
        let kind = if matches!(part, Part::Weight | Part::BaseWeight) { "weight" } else { "bias" };
        let second_name = name == HEAD && kind == "weight" && self.parameters.tied_head();
        let parameter = format!("{}.{kind}", if second_name { EMBEDDING } else { name });
        let Some(spec) = self.parameters.get(&parameter) else {
            return Err(self.wrong(tensor, format!("the model has no {parameter}; ListParameters names what it has")));
        };
        let (shape, (rows, cols)) = (spec.shape.clone(), matrix_shape(&spec.shape));
        self.expect_shape(tensor, &shape)?;
        if of_base && !module.contains_key(&Part::A) && !module.contains_key(&Part::EmbeddingA) {
            return Err(self.wrong(tensor, "is the base of an adapter that is not there".into()));
        }
        if !expected.contains(&parameter) {
            let message = "neither modules_to_save nor bias of adapter_config names it";
            return if of_base { Ok(()) } else { Err(self.wrong(tensor, message.into())) };
        }
        if second_name {
            return Ok(());
        }
        let stored = self.tensors[tensor].dtype;
        let dtype = if self.parameters.dtype() == Dtype::Bf16 { Dtype::Bf16 } else { stored };
        let change = self.changes.entry(parameter).or_default();
        if matches!(change.delta, Some(PlannedDelta::LowRank(_))) {
            return Err(self.wrong(tensor, "is of a module that is adapted; modules_to_save cannot name it too".into()));
        }
        if let Some(other) = change.whole.replace(PlannedWhole { tensor, dtype, rows, cols }) {
            return Err(self.wrong(tensor, format!("is twice; the other is {}", self.name(other.tensor))));
        }
        Ok(())
    }

    /// Parameters of `modules_to_save`: PEFT takes every module whose name ends like this, with all below it.
    fn saved_parameters(&self) -> Result<BTreeSet<String>> {
        let field = "adapter_config.modules_to_save";
        let (embedding, tied) = (format!("{EMBEDDING}.weight"), self.parameters.tied_head());
        let mut saved = BTreeSet::new();
        for key in &self.config.modules_to_save {
            let of_key = |name: &str| name.match_indices('.').any(|(end, _)| name[..end].ends_with(key.as_str()));
            let names = self.parameters.iter().map(|spec| spec.name.as_str()).filter(|name| of_key(name));
            let names: Vec<String> = names.map(str::to_string).collect();
            let head = tied && HEAD.ends_with(key.as_str());
            if names.is_empty() && !head {
                return Err(Error::invalid(field, format!("{key:?} is the end of no module's name in this model")));
            }
            saved.extend(names);
            if !tied || !(head || saved.contains(&embedding)) {
                continue;
            }
            if !self.config.ensure_weight_tying {
                let message = format!(
                    "{key:?} would untie {HEAD} from {EMBEDDING}, which are one matrix in this model; \
                     train with ensure_weight_tying, or without it"
                );
                return Err(Error::invalid(field, message));
            }
            saved.insert(embedding.clone());
        }
        Ok(saved)
    }

    fn trained_biases(&self, modules: &BTreeMap<String, Module>) -> Vec<String> {
        match self.config.bias {
            TrainedBias::None => Vec::new(),
            TrainedBias::All => {
                let names = self.parameters.iter().map(|spec| &spec.name);
                names.filter(|name| name.ends_with(".bias")).cloned().collect()
            }
            TrainedBias::Adapted => {
                let adapted = modules.iter().filter(|(_, module)| module.contains_key(&Part::A));
                let biases = adapted.map(|(name, _)| format!("{name}.bias"));
                biases.filter(|bias| self.parameters.get(bias).is_some()).collect()
            }
        }
    }

    /// Rows and columns of a weight matrix.
    fn matrix(&self, parameter: &str, tensor: usize) -> Result<(usize, usize)> {
        match self.parameters.get(parameter).map(|spec| spec.shape.as_slice()) {
            Some(&[rows, cols]) => Ok((rows, cols)),
            Some(_) => Err(self.wrong(tensor, format!("{parameter} is no matrix; only linear layers are adapted"))),
            None => Err(self.wrong(tensor, format!("the model has no {parameter}; ListParameters names what it has"))),
        }
    }

    fn expect_shape(&self, tensor: usize, expected: &[usize]) -> Result<()> {
        let shape = &self.tensors[tensor].shape;
        if shape == expected {
            return Ok(());
        }
        let message = format!("has shape {shape:?}; the model and adapter_config make it {expected:?}");
        Err(self.wrong(tensor, message))
    }

    fn same_dtype(&self, a: usize, b: usize) -> Result<Dtype> {
        let (first, second) = (self.tensors[a].dtype, self.tensors[b].dtype);
        if first != second {
            let message = format!("is {second:?}, but {} is {first:?}; give both in one precision", self.name(a));
            return Err(self.wrong(b, message));
        }
        Ok(first)
    }

    fn name(&self, tensor: usize) -> &str {
        &self.tensors[tensor].name
    }

    fn wrong(&self, tensor: usize, message: String) -> Error {
        Error::invalid(self.name(tensor), message)
    }
}

/// The element type of a sum of these, as PyTorch has it.
fn promote(a: Dtype, b: Dtype) -> Dtype {
    if a == b { a } else { Dtype::F32 }
}
