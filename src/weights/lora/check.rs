//! Checks an adapter's tensors against its configuration and the model, before any of their values is there.

mod embedding;
mod experts;

use std::collections::{BTreeMap, BTreeSet};
use std::ops::Range;

use super::AdapterTensor;
use super::config::{AdapterConfig, TrainedBias};
use super::names::{PREFIX, TensorName, TensorRole};
use super::spec::{AdapterSpec, ChangeSpec, DeltaSpec, FactorKind, LowRankSpec, WholeSpec};
use crate::error::{Error, Result};
use crate::memory::Traffic;
use crate::weights::parameters::{Dtype, Parameters, all_names, canonical, matrix_shape, parameters_of};

const EMBEDDING: &str = "model.embed_tokens";
const HEAD: &str = "lm_head";

/// The tensors of one module: the index of each among the adapter's tensors.
type Module = BTreeMap<TensorRole, usize>;

impl AdapterSpec {
    /// Checks an adapter's tensors against `config`, the text of `adapter_config.json`, and the model. Without a
    /// configuration and tensors it is the adapter that changes nothing. The memory for the check is counted in
    /// `traffic` meanwhile.
    ///
    /// # Errors
    /// `InvalidArgument` naming the tensor or the configuration's field that is unknown, missing, twice, of another
    /// shape, or not supported; `ResourceExhausted` if there is no memory to read the configuration.
    pub fn new(
        config: &str,
        tensors: &[AdapterTensor<'_>],
        parameters: &Parameters,
        traffic: &Traffic,
    ) -> Result<Self> {
        let changes = if config.trim().is_empty() && tensors.is_empty() {
            BTreeMap::new()
        } else {
            check(config, tensors, parameters, traffic)?
        };
        Ok(Self { changes, serving: parameters.dtype() })
    }
}

/// The changes by an adapter, by the parameter's name.
///
/// # Errors
/// See [`AdapterSpec::new`](super::AdapterSpec::new).
fn check(
    config: &str,
    tensors: &[AdapterTensor<'_>],
    parameters: &Parameters,
    traffic: &Traffic,
) -> Result<BTreeMap<String, ChangeSpec>> {
    let config = AdapterConfig::parse(config, traffic)?;
    if tensors.is_empty() {
        return Err(Error::invalid(
            "tensors",
            "adapter_config is given, but no tensors; give neither for the base itself",
        ));
    }
    let (modules, own_names) = group(tensors, parameters)?;
    let mut checker = Checker { config, tensors, parameters, own_names, changes: BTreeMap::new() };
    for (name, module) in &modules {
        checker.adapt(name, module)?;
    }
    checker.replace(&modules)?;
    Ok(checker.changes)
}

/// The tensors by the name of their module in the base model, and the names of these modules in the adapter where they
/// differ.
fn group(
    tensors: &[AdapterTensor<'_>],
    parameters: &Parameters,
) -> Result<(BTreeMap<String, Module>, BTreeMap<String, String>)> {
    let mut modules: BTreeMap<String, Module> = BTreeMap::new();
    let mut own_names = BTreeMap::new();
    let mut first_adapter = None;
    for (index, entry) in tensors.iter().enumerate() {
        let Some(TensorName { module, adapter, role }) = TensorName::parse(entry.name) else {
            let message = format!(
                "not a name that PEFT gives to a tensor of a LoRA adapter ({PREFIX}<module>.lora_A.weight ...)"
            );
            return Err(Error::invalid(entry.name, message));
        };
        if let Some(adapter) = adapter {
            let first = *first_adapter.get_or_insert(adapter);
            if first != adapter {
                let message = format!("is of the adapter {adapter:?}, others are of {first:?}; send one adapter");
                return Err(Error::invalid(entry.name, message));
            }
        }
        let name = canonical(&module, parameters).into_owned();
        if name != module {
            own_names.insert(name.clone(), module);
        }
        if let Some(other) = modules.entry(name).or_default().insert(role, index) {
            return Err(Error::invalid(entry.name, format!("is twice; the other is {}", tensors[other].name)));
        }
    }
    Ok((modules, own_names))
}

/// The parameters that a tensor of the adapter has one below the other.
struct TensorLayout {
    /// The name of each, and its rows in the tensor.
    parts: Vec<(String, Range<usize>)>,
    shape: Vec<usize>,
}

struct Checker<'a> {
    config: AdapterConfig,
    tensors: &'a [AdapterTensor<'a>],
    parameters: &'a Parameters,
    /// For modules that have another name in the adapter, that name: patterns of its configuration are matched with it.
    own_names: BTreeMap<String, String>,
    changes: BTreeMap<String, ChangeSpec>,
}

impl Checker<'_> {
    /// Notes what a module's factors change; nothing for a module without factors.
    fn adapt(&mut self, name: &str, module: &Module) -> Result<()> {
        if self.is_ignored(&format!("{name}.weight")) {
            return Ok(());
        }
        let linear = self.pair(name, module, (TensorRole::A, "lora_A.weight"), (TensorRole::B, "lora_B.weight"))?;
        if let Some((a, b)) = linear
            && self.adapt_experts(name, a, b)?
        {
            return Ok(());
        }
        let embedding = self.pair(
            name,
            module,
            (TensorRole::EmbeddingA, "lora_embedding_A"),
            (TensorRole::EmbeddingB, "lora_embedding_B"),
        )?;
        match (linear, embedding) {
            (Some((a, _)), Some(_)) => {
                Err(self.wrong(a, "is of a module that has lora_embedding_A too; a module has one of them".into()))
            }
            (Some((a, b)), None) => self.adapt_linear(name, module, a, b),
            (None, Some((a, b))) => self.adapt_embedding(name, a, b),
            (None, None) => match module.get(&TensorRole::Magnitude).or(module.get(&TensorRole::BiasOfB)) {
                Some(&tensor) => Err(self.wrong(tensor, "has no lora_A and lora_B beside it".into())),
                None => Ok(()),
            },
        }
    }

    /// The indices of a pair of factors: `None` if the module has neither.
    ///
    /// # Errors
    /// `InvalidArgument` naming the one that is missing if the module has only the other.
    fn pair(
        &self,
        name: &str,
        module: &Module,
        (first, first_name): (TensorRole, &str),
        (second, second_name): (TensorRole, &str),
    ) -> Result<Option<(usize, usize)>> {
        let missing = |missing: &str, there: usize| {
            Err(Error::invalid(
                format!("{PREFIX}{}.{missing}", self.own_name(name)),
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

    /// Whether a weight or bias is of a vision tower that is not served.
    fn is_ignored(&self, parameter: &str) -> bool {
        parameters_of(parameter, self.parameters).iter().any(|part| self.parameters.is_ignored(part))
    }

    /// The layout of a tensor of this name; `None` if the model has no such parameter.
    fn layout(&self, parameter: &str) -> Option<TensorLayout> {
        let (mut parts, mut shape, mut rows) = (Vec::new(), Vec::new(), 0);
        for part in parameters_of(parameter, self.parameters) {
            let spec = self.parameters.get(&part)?;
            let (count, _) = matrix_shape(&spec.shape);
            parts.push((part, rows..rows + count));
            rows += count;
            shape.clone_from(&spec.shape);
        }
        if parts.len() > 1 {
            shape[0] = rows;
        }
        Some(TensorLayout { parts, shape })
    }

    /// The name of a module in the adapter.
    fn own_name<'n>(&'n self, name: &'n str) -> &'n str {
        self.own_names.get(name).map_or(name, String::as_str)
    }

    fn adapt_linear(&mut self, name: &str, module: &Module, a: usize, b: usize) -> Result<()> {
        let (parameter, kind) = self.linear_weight(name, a)?;
        // The factors of fused projections change each of them: by all of `A`, and by its own rows of `B`.
        let parts = parameters_of(&parameter, self.parameters);
        let shapes = parts.iter().map(|part| self.matrix(part, a)).collect::<Result<Vec<_>>>()?;
        let (rows, cols) = (shapes.iter().map(|(rows, _)| rows).sum(), shapes[0].1);
        let rank = self.config.rank(self.own_name(name)) as usize;
        self.expect_shape(a, &[rank, cols])?;
        self.expect_shape(b, &[rows, rank])?;
        self.check_expert(&parameter, a)?;
        let dtype = self.same_dtype(a, b)?;
        let magnitude = self.magnitude(name, module, rows, dtype)?;
        let scaling = self.config.scaling(self.own_name(name))?;
        self.adapt_bias(name, module, a, scaling)?;
        let (product, roundings) = self.roundings(&parameter, dtype);
        let mut first_row = 0;
        for (part, (rows, cols)) in parts.iter().zip(shapes) {
            let delta = LowRankSpec {
                a,
                b,
                magnitude,
                rank,
                first_row,
                rows,
                cols,
                dtype,
                product,
                scaling,
                roundings: roundings.clone(),
                kind,
                expert: None,
            };
            self.set_delta(part, a, DeltaSpec::LowRank(delta))?;
            first_row += rows;
        }
        Ok(())
    }

    /// The parameter that the adapter of a linear layer changes, and what the factors are to it.
    fn linear_weight(&self, name: &str, tensor: usize) -> Result<(String, FactorKind)> {
        if name == HEAD && self.parameters.tied_head() {
            return Ok((format!("{EMBEDDING}.weight"), FactorKind::TiedHead));
        }
        if name == EMBEDDING {
            let message = "is of the embedding, whose factors are lora_embedding_A and lora_embedding_B";
            return Err(self.wrong(tensor, message.into()));
        }
        Ok((format!("{name}.weight"), FactorKind::Linear))
    }

    fn magnitude(
        &self,
        name: &str,
        module: &Module,
        rows: usize,
        delta: Dtype,
    ) -> Result<Option<(usize, Dtype, Dtype)>> {
        match (module.get(&TensorRole::Magnitude), self.config.dora) {
            (None, false) => Ok(None),
            (None, true) => Err(Error::invalid(
                format!("{PREFIX}{}.lora_magnitude_vector", self.own_name(name)),
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
        match (module.get(&TensorRole::BiasOfB), self.config.lora_bias) {
            (None, false) => Ok(()),
            (None, true) => Err(Error::invalid(
                format!("{PREFIX}{}.lora_B.bias", self.own_name(name)),
                format!("is missing, but adapter_config.lora_bias is true and {} is there", self.name(a)),
            )),
            (Some(&tensor), false) => {
                Err(self.wrong(tensor, "is here, but adapter_config.lora_bias is not true".into()))
            }
            (Some(&tensor), true) => {
                let Some(TensorLayout { parts, shape }) = self.layout(&parameter) else {
                    return Err(self.wrong(tensor, format!("cannot be merged: {name} has no bias in this model")));
                };
                self.expect_shape(tensor, &shape)?;
                parts.into_iter().try_for_each(|(part, rows)| {
                    let (first_row, rows) = (rows.start, rows.len());
                    self.set_delta(&part, tensor, DeltaSpec::Bias { tensor, first_row, rows, scaling })
                })
            }
        }
    }

    fn set_delta(&mut self, parameter: &str, tensor: usize, delta: DeltaSpec) -> Result<()> {
        let change = self.changes.entry(parameter.to_string()).or_default();
        if change.delta.replace(delta).is_some() {
            return Err(self.wrong(
                tensor,
                match parameter.starts_with(EMBEDDING) {
                    true => format!("{HEAD} and {EMBEDDING} are one matrix in this model; adapt one of them"),
                    false => format!(
                        "changes {parameter}, which another module of the adapter changes too; adapt one of them"
                    ),
                },
            ));
        }
        Ok(())
    }

    /// Notes the parameters that are replaced as a whole: `modules_to_save` and trained biases. The base's own weights
    /// and biases, which `state_dict` writes beside the factors, change nothing.
    fn replace(&mut self, modules: &BTreeMap<String, Module>) -> Result<()> {
        let mut expected = self.saved_parameters()?;
        expected.extend(self.trained_biases(modules));
        for (name, module) in modules {
            for role in [TensorRole::Weight, TensorRole::Bias, TensorRole::BaseWeight, TensorRole::BaseBias] {
                if let Some(&tensor) = module.get(&role) {
                    self.replace_one(name, module, (role, tensor), &expected)?;
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
        (role, tensor): (TensorRole, usize),
        expected: &BTreeSet<String>,
    ) -> Result<()> {
        let of_base = matches!(role, TensorRole::BaseWeight | TensorRole::BaseBias);
        let kind = if matches!(role, TensorRole::Weight | TensorRole::BaseWeight) { "weight" } else { "bias" };
        let second_name = name == HEAD && kind == "weight" && self.parameters.tied_head();
        let parameter = format!("{}.{kind}", if second_name { EMBEDDING } else { name });
        if self.is_ignored(&parameter) {
            return Ok(());
        }
        let Some(TensorLayout { parts, shape }) = self.layout(&parameter) else {
            return Err(self.wrong(tensor, format!("the model has no {parameter}; ListParameters names what it has")));
        };
        let (_, cols) = matrix_shape(&shape);
        self.expect_shape(tensor, &shape)?;
        if of_base && !module.contains_key(&TensorRole::A) && !module.contains_key(&TensorRole::EmbeddingA) {
            return Err(self.wrong(tensor, "is the base of an adapter that is not there".into()));
        }
        if !parts.iter().all(|(part, _)| expected.contains(part)) {
            let message = "neither modules_to_save nor bias of adapter_config names it";
            return if of_base { Ok(()) } else { Err(self.wrong(tensor, message.into())) };
        }
        if second_name {
            return Ok(());
        }
        let stored = self.tensors[tensor].dtype;
        let dtype = if self.parameters.dtype() == Dtype::Bf16 { Dtype::Bf16 } else { stored };
        for (part, rows) in parts {
            let change = self.changes.entry(part).or_default();
            if matches!(change.delta, Some(DeltaSpec::LowRank(_))) {
                let message = "is of a module that is adapted; modules_to_save cannot name it too";
                return Err(self.wrong(tensor, message.into()));
            }
            let whole = WholeSpec { tensor, dtype, first_row: rows.start, rows: rows.len(), cols };
            if let Some(other) = change.whole.replace(whole) {
                return Err(self.wrong(tensor, format!("is twice; the other is {}", self.name(other.tensor))));
            }
        }
        Ok(())
    }

    /// The parameters that `modules_to_save` names. As in PEFT, an entry names every module whose name ends with it,
    /// and all modules below.
    fn saved_parameters(&self) -> Result<BTreeSet<String>> {
        let field = "adapter_config.modules_to_save";
        let (embedding, tied) = (format!("{EMBEDDING}.weight"), self.parameters.tied_head());
        let mut saved = BTreeSet::new();
        for key in &self.config.modules_to_save {
            let of_key = |name: &str| name.match_indices('.').any(|(end, _)| name[..end].ends_with(key.as_str()));
            let is_of_key = |name: &str| all_names(name, self.parameters).iter().any(|name| of_key(name));
            let names = self.parameters.pushable().map(|spec| spec.name.as_str()).filter(|name| is_of_key(name));
            let names: Vec<String> = names.map(str::to_string).collect();
            let head = tied && HEAD.ends_with(key.as_str());
            if names.is_empty() && !head {
                return Err(Error::invalid(field, format!("{key:?} is the end of no module's name in this model")));
            }
            saved.extend(names.into_iter().filter(|name| !self.parameters.is_ignored(name)));
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

    /// The biases that the adapter replaces: the field `bias` of its configuration.
    fn trained_biases(&self, modules: &BTreeMap<String, Module>) -> Vec<String> {
        match self.config.bias {
            TrainedBias::None => Vec::new(),
            TrainedBias::All => {
                let names = self.parameters.iter().map(|spec| &spec.name);
                names.filter(|name| name.ends_with(".bias")).cloned().collect()
            }
            TrainedBias::Adapted => {
                let adapted = modules.iter().filter(|(_, module)| module.contains_key(&TensorRole::A));
                let biases = adapted.flat_map(|(name, _)| parameters_of(&format!("{name}.bias"), self.parameters));
                biases.filter(|bias| self.parameters.get(bias).is_some()).collect()
            }
        }
    }

    /// Rows and columns of the weight matrix that `tensor` adapts.
    ///
    /// # Errors
    /// `InvalidArgument` naming `tensor` if `parameter` is not a matrix of the model.
    fn matrix(&self, parameter: &str, tensor: usize) -> Result<(usize, usize)> {
        match self.parameters.get(parameter).map(|spec| spec.shape.as_slice()) {
            Some(&[rows, cols]) => Ok((rows, cols)),
            Some(_) => Err(self.wrong(tensor, format!("{parameter} is no matrix; only linear layers are adapted"))),
            None => Err(self.wrong(tensor, format!("the model has no {parameter}; ListParameters names what it has"))),
        }
    }

    fn expect_shape(&self, tensor: usize, expected: &[usize]) -> Result<()> {
        let shape = self.tensors[tensor].shape;
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
        self.tensors[tensor].name
    }

    fn wrong(&self, tensor: usize, message: String) -> Error {
        Error::invalid(self.name(tensor), message)
    }
}

/// The dtype of the sum of two tensors in PyTorch.
fn promote(a: Dtype, b: Dtype) -> Dtype {
    if a == b { a } else { Dtype::F32 }
}
