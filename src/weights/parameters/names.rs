//! Names under which trainers send parameters: with wrappers, fused, or the tied head.

use std::borrow::Cow;

use super::{ParamSpec, Parameters, matrix_shape};

/// Names that FSDP, torch.compile, activation checkpointing and PEFT give to a module that they wrap, as segments of
/// the names of its parameters.
const WRAPPERS: [&str; 4] = ["_fsdp_wrapped_module", "_orig_mod", "_checkpoint_wrapped_module", "base_layer"];
/// Fused projections: the name of the matrix that some models and trainers have, and the projections in it, one below
/// the other.
const FUSED: [(&str, &[&str]); 2] =
    [("qkv_proj", &["q_proj", "k_proj", "v_proj"]), ("gate_up_proj", &["gate_proj", "up_proj"])];
/// The fused projections of a vision tower's attention, and the parameters of it.
const TOWER_ATTENTION: (&str, &[&str]) = ("qkv", &["q_proj", "k_proj", "v_proj"]);
/// Names of the tensors `[experts, rows, columns]` in which trainers keep projections of all experts of a layer, and
/// the projections of an expert that each has one below the other.
const FUSED_EXPERTS: [(&str, &[&str]); 2] =
    [("gate_up_proj", &["gate_proj", "up_proj"]), ("down_proj", &["down_proj"])];
/// The module of a layer that holds its experts, by their numbers.
const EXPERTS: &str = "experts";
/// The names by which Mixtral's checkpoints call the experts and their router, and the parameters' own.
const MIXTRAL: (&str, &str) = ("block_sparse_moe", "mlp");
const MIXTRAL_PROJECTIONS: [(&str, &str); 3] = [("w1", "gate_proj"), ("w2", "down_proj"), ("w3", "up_proj")];
/// The modules beside the layers under Qwen v1's names, and the parameters' own.
const QWEN_V1: [(&str, &str); 2] = [("transformer.wte", "model.embed_tokens"), ("transformer.ln_f", "model.norm")];
/// The beginning of the names of a layer's modules, in front of its number, likewise.
const QWEN_V1_LAYERS: (&str, &str) = ("transformer.h.", "model.layers.");
/// The modules of a layer, behind its number, likewise. `w1` is what the gate `w2` multiplies.
const QWEN_V1_MODULES: [(&str, &str); 7] = [
    ("ln_1", "input_layernorm"),
    ("ln_2", "post_attention_layernorm"),
    ("attn.c_attn", "self_attn.qkv_proj"),
    ("attn.c_proj", "self_attn.o_proj"),
    ("mlp.w1", "mlp.up_proj"),
    ("mlp.w2", "mlp.gate_proj"),
    ("mlp.c_proj", "mlp.down_proj"),
];
/// Endings of the names of buffers that some trainers send with the parameters. The model needs none of them, because
/// its configuration determines them.
const BUFFERS: [&str; 1] = ["rotary_emb.inv_freq"];
const HEAD: &str = "lm_head.weight";
pub(in crate::weights) const EMBEDDING: &str = "model.embed_tokens.weight";

/// Whether a parameter is of a vision tower, or of the projector behind it.
pub fn is_of_tower(parameter: &str) -> bool {
    VisionNames::of_parameter(parameter).is_some() || parameter.starts_with(PROJECTOR)
}

/// The names of a model with a vision tower: in checkpoints, in memory as trainers push them, and as vLLM has them.
#[derive(Debug)]
pub(super) struct VisionNames {
    /// Beginning of the names of the tower's parameters.
    tower: &'static str,
    /// Beginnings of names on disk, and those of the parameters.
    stored: &'static [(&'static str, &'static str)],
    /// Further beginnings of names, which trainers and vLLM have.
    sent: &'static [(&'static str, &'static str)],
    /// A beginning of names, as the parameters have it, behind which segments have other names, with these segments.
    segments: Option<(&'static str, &'static [(&'static str, &'static str)])>,
}

const QWEN2_5_VL: VisionNames = VisionNames {
    tower: "visual.",
    stored: &[],
    sent: &[
        ("model.language_model.", "model."),
        ("model.visual.", "visual."),
        ("language_model.model.", "model."),
        ("language_model.lm_head", "lm_head"),
    ],
    segments: None,
};

/// The parameters have the names of transformers' checkpoints. InternVL's own code has others for the tower
/// (`vision_model`) and for the projector (`mlp1`).
const INTERNVL: VisionNames = VisionNames {
    tower: "vision_tower.",
    stored: &[
        ("language_model.model.", "model."),
        ("language_model.lm_head", "lm_head"),
        ("vision_model.", "vision_tower."),
        ("mlp1.0", "multi_modal_projector.layer_norm"),
        ("mlp1.1", "multi_modal_projector.linear_1"),
        ("mlp1.3", "multi_modal_projector.linear_2"),
    ],
    sent: &[
        ("model.language_model.", "model."),
        ("model.vision_tower.", "vision_tower."),
        ("model.multi_modal_projector.", "multi_modal_projector."),
    ],
    segments: Some((
        "vision_tower.",
        &[
            ("class_embedding", "cls_token"),
            ("position_embedding", "position_embeddings"),
            ("patch_embedding", "patch_embeddings.projection"),
            ("layers", "layer"),
            ("norm1", "layernorm_before"),
            ("norm2", "layernorm_after"),
            ("attn", "attention"),
            ("proj", "projection_layer"),
            ("ls1", "lambda_1"),
            ("ls2", "lambda_2"),
        ],
    )),
};

/// The beginning of the names of a projector's parameters, which Qwen's tower has within.
const PROJECTOR: &str = "multi_modal_projector.";
const VISION_NAMES: [&VisionNames; 2] = [&QWEN2_5_VL, &INTERNVL];

impl VisionNames {
    /// Those of a model with these parameters, if some are of a vision tower.
    pub fn of_parameters(specs: &[ParamSpec]) -> Option<&'static Self> {
        specs.iter().find_map(|spec| Self::of_parameter(&spec.name))
    }

    /// Those of a model that has a parameter of this name, if it is one of a vision tower.
    pub fn of_parameter(name: &str) -> Option<&'static Self> {
        VISION_NAMES.into_iter().find(|names| name.starts_with(names.tower))
    }

    /// The other names of a parameter: in checkpoints, in memory, and in vLLM.
    fn others(&self, parameter: &str) -> Vec<String> {
        let all = self.sent.iter().chain(self.stored);
        let found = all.filter_map(|(prefix, own)| {
            let rest = parameter.strip_prefix(own)?;
            let other_segments = self.segments.filter(|(tower, _)| tower == own && !prefix.ends_with(tower));
            let Some((_, segments)) = other_segments else { return Some(format!("{prefix}{rest}")) };
            let rename =
                |segment| segments.iter().find(|(_, own)| *own == segment).map_or(segment, |(other, _)| *other);
            Some(format!("{prefix}{}", rest.split('.').map(rename).collect::<Vec<&str>>().join(".")))
        });
        found.collect()
    }

    /// The parameter's or module's name for one that begins with one of `prefixes`.
    fn renamed<'a>(&self, name: &'a str, prefixes: impl IntoIterator<Item = &'a [(&'a str, &'a str)]>) -> Cow<'a, str> {
        let prefixes = prefixes.into_iter().flatten();
        let found = prefixes.into_iter().find_map(|(prefix, own)| Some((name.strip_prefix(prefix)?, own)));
        let name = found.map_or(Cow::Borrowed(name), |(rest, own)| Cow::Owned(format!("{own}{rest}")));
        let Some((prefix, segments)) = self.segments.filter(|(prefix, _)| name.starts_with(prefix)) else {
            return name;
        };
        let rename = |segment| segments.iter().find(|(other, _)| *other == segment).map_or(segment, |(_, own)| *own);
        let renamed: Vec<&str> = name[prefix.len()..].split('.').map(rename).collect();
        Cow::Owned(format!("{prefix}{}", renamed.join(".")))
    }
}

/// The parameters of the model that one pushed tensor brings.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(in crate::weights) struct ParameterMapping {
    /// The parameters, one below the other: one, several for a fused tensor, none for a buffer that the model does not
    /// need.
    pub parts: Vec<FusedPart>,
    /// The shape that the tensor must have; `None` for a buffer that the model does not need.
    pub shape: Option<Vec<usize>>,
    /// Values of each of the tensor's rows, which are those of its parameters. 0 for a buffer that the model does not
    /// need.
    pub columns: usize,
    /// Whether the tensor is named as the head, in a model whose head is the embedding.
    pub tied_head: bool,
}

impl ParameterMapping {
    /// That of a tensor that is this parameter.
    fn of_one(spec: &ParamSpec) -> Self {
        let part = FusedPart { parameter: spec.name.clone(), first_row: 0 };
        let (_, columns) = matrix_shape(&spec.shape);
        Self { parts: vec![part], shape: Some(spec.shape.clone()), columns, tied_head: false }
    }
}

/// A parameter inside a pushed tensor.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(in crate::weights) struct FusedPart {
    pub parameter: String,
    /// The row of the tensor that the parameter begins with.
    pub first_row: usize,
}

/// The parameters that a tensor of this name brings, without those that are ignored; `None` if the model has none for
/// it.
pub(in crate::weights) fn resolve(name: &str, parameters: &Parameters) -> Option<ParameterMapping> {
    let mut mapping = find(name, parameters)?;
    mapping.parts.retain(|part| !parameters.is_ignored(&part.parameter));
    Some(mapping)
}

/// All names that trainers and checkpoints may have for a parameter, or for a fused tensor that it is in.
pub(in crate::weights) fn all_names(parameter: &str, parameters: &Parameters) -> Vec<String> {
    let mut names = vec![parameter.to_string()];
    match parameters.vision_names() {
        Some(vision) => names.extend(vision.others(parameter)),
        None => {
            names.extend(fused_with(parameter).map(|(block, fused, _, kind)| format!("{block}.{fused}.{kind}")));
            let of_qwen_v1: Vec<String> = names.iter().filter_map(|name| in_qwen_v1(name)).collect();
            names.extend(of_qwen_v1);
        }
    }
    names
}

/// The parameters that a tensor of this name has, whether they serve or are ignored.
fn find(name: &str, parameters: &Parameters) -> Option<ParameterMapping> {
    // Most pushed tensors have a parameter's own name, and taking names apart costs more than all else that is done
    // with a declaration.
    if let Some(spec) = parameters.find(name) {
        return Some(ParameterMapping::of_one(spec));
    }
    let name = canonical(&plain_name(name), parameters).into_owned();
    if BUFFERS.iter().any(|buffer| name.ends_with(buffer)) {
        return Some(ParameterMapping::default());
    }
    let tied_head = name == HEAD && parameters.tied_head();
    if let Some(spec) = parameters.find(if tied_head { EMBEDDING } else { &name }) {
        return Some(ParameterMapping { tied_head, ..ParameterMapping::of_one(spec) });
    }
    fused_experts(&name, parameters).or_else(|| fused(&name, parameters))
}

/// The name of a module or parameter, given one that checkpoints, trainers or vLLM have for it.
pub(in crate::weights) fn canonical<'a>(name: &'a str, parameters: &Parameters) -> Cow<'a, str> {
    match parameters.vision_names() {
        Some(names) => names.renamed(name, [names.sent, names.stored]),
        None => text_renamed(name),
    }
}

/// The parameter's or module's name for one that a model of text alone has.
fn text_renamed(name: &str) -> Cow<'_, str> {
    of_qwen_v1(name).map_or_else(|| experts_renamed(name), Cow::Owned)
}

/// The parameter's or module's name for one that Qwen v1 has; `None` for any other.
fn of_qwen_v1(name: &str) -> Option<String> {
    let (layers, own) = QWEN_V1_LAYERS;
    let Some(in_layer) = name.strip_prefix(layers) else {
        return QWEN_V1.iter().find_map(|(theirs, own)| module_renamed(name, theirs, own));
    };
    let (number, module) = in_layer.split_once('.')?;
    let module = QWEN_V1_MODULES.iter().find_map(|(theirs, own)| module_renamed(module, theirs, own))?;
    Some(format!("{own}{number}.{module}"))
}

/// The name that a parameter, or a fused tensor of several, has in Qwen v1; `None` if it has none of its own.
fn in_qwen_v1(parameter: &str) -> Option<String> {
    let (layers, own) = QWEN_V1_LAYERS;
    let Some(in_layer) = parameter.strip_prefix(own) else {
        return QWEN_V1.iter().find_map(|(theirs, own)| module_renamed(parameter, own, theirs));
    };
    let (number, module) = in_layer.split_once('.')?;
    let module = QWEN_V1_MODULES.iter().find_map(|(theirs, own)| module_renamed(module, own, theirs))?;
    Some(format!("{layers}{number}.{module}"))
}

/// `name` with the module `from` at its beginning called `to`; `None` if it begins with another.
fn module_renamed(name: &str, from: &str, to: &str) -> Option<String> {
    let rest = name.strip_prefix(from).filter(|rest| rest.is_empty() || rest.starts_with('.'))?;
    Some(format!("{to}{rest}"))
}

/// The parameter's or module's name for one that Mixtral's checkpoints have.
fn experts_renamed(name: &str) -> Cow<'_, str> {
    let (theirs, own) = MIXTRAL;
    let Some((layer, rest)) = name.split_once(&format!(".{theirs}")) else { return Cow::Borrowed(name) };
    let projection = |segment: &str| MIXTRAL_PROJECTIONS.iter().find(|(other, _)| *other == segment);
    let rest: Vec<&str> = rest.split('.').map(|s| projection(s).map_or(s, |(_, own)| own)).collect();
    Cow::Owned(format!("{layer}.{own}{}", rest.join(".")))
}

/// The numbers of heads of a decoder's attention, by which the rows of its fused `qkv_proj` are divided.
#[derive(Clone, Copy, Debug)]
pub(in crate::weights) struct HeadCounts {
    pub heads: usize,
    pub kv_heads: usize,
}

/// The parameters' names of a tensor of a checkpoint, which has them one below the other, each with its share of the
/// rows. One has all of them.
pub(in crate::weights) fn stored_parameters(name: &str, counts: HeadCounts) -> Vec<(String, usize)> {
    let renamed = |names: &&VisionNames| names.renamed(name, [names.sent, names.stored]);
    let name = VISION_NAMES.iter().map(renamed).find(|own| own != name).unwrap_or_else(|| text_renamed(name));
    stored_together(&name, counts).unwrap_or_else(|| vec![(name.into_owned(), 1)])
}

/// A parameter's name without the segments that wrappers add to it.
fn plain_name(name: &str) -> String {
    let segments: Vec<&str> = name.split('.').filter(|segment| !WRAPPERS.contains(segment)).collect();
    let mut rest = &segments[..];
    while let ["module", inner @ ..] | ["base_model", "model", inner @ ..] = rest {
        rest = inner;
    }
    rest.join(".")
}

/// The parameters of a fused tensor, if this is the name of one.
fn fused(name: &str, parameters: &Parameters) -> Option<ParameterMapping> {
    let is_tower = parameters.vision_names().is_some_and(|names| name.starts_with(names.tower));
    let (block, projections, kind) = fused_projections(name, is_tower)?;
    let mut mapping = ParameterMapping::default();
    let mut rows = 0;
    for projection in projections {
        let spec = parameters.find(&format!("{block}.{projection}.{kind}"))?;
        let (&part_rows, rest) = spec.shape.split_first()?;
        mapping.parts.push(FusedPart { parameter: spec.name.clone(), first_row: rows });
        rows += part_rows;
        mapping.shape = Some([&[rows], rest].concat());
        mapping.columns = rest.iter().product();
    }
    Some(mapping)
}

/// The names of the tensors that have all experts of a layer, if a module of this name is what PEFT wraps for one.
pub(in crate::weights) fn expert_tensors(module: &str) -> Option<[String; 2]> {
    let experts = module.strip_suffix(".base_layer").unwrap_or(module);
    experts.strip_suffix(EXPERTS)?.strip_suffix('.')?;
    Some(FUSED_EXPERTS.map(|(fused, _)| format!("{experts}.{fused}")))
}

/// Whether a parameter is of an expert, or of the router that chooses among them.
pub(in crate::weights) fn is_of_experts(parameter: &str) -> bool {
    parameter.contains(&format!(".{EXPERTS}.")) || parameter.ends_with(".mlp.gate.weight")
}

/// The parameters of a tensor that has a projection of all experts of a layer, or two, if this is the name of one.
fn fused_experts(name: &str, parameters: &Parameters) -> Option<ParameterMapping> {
    let (experts, fused) = name.rsplit_once('.')?;
    let (_, projections) = FUSED_EXPERTS.iter().find(|(name, _)| *name == fused)?;
    experts.strip_suffix(EXPERTS)?.strip_suffix('.')?;
    let spec = |index: usize, projection: &str| parameters.find(&format!("{experts}.{index}.{projection}.weight"));
    let mut mapping = ParameterMapping::default();
    let (mut rows, mut count) = (0, 0);
    while spec(count, projections[0]).is_some() {
        for projection in *projections {
            let spec = spec(count, projection)?;
            mapping.parts.push(FusedPart { parameter: spec.name.clone(), first_row: rows });
            rows += spec.shape[0];
            mapping.columns = spec.shape[1];
        }
        count += 1;
    }
    mapping.shape = Some(vec![count, rows.checked_div(count)?, mapping.columns]);
    Some(mapping)
}

/// The block of the projections in a fused tensor with this canonical name, these projections, and what it is of them:
/// their weight or bias. `None` if no fused tensor has such a name.
fn fused_projections(name: &str, is_tower: bool) -> Option<(&str, &'static [&'static str], &str)> {
    let (module, kind) = name.rsplit_once('.')?;
    let (block, fused) = module.rsplit_once('.')?;
    let (of_tower, parts) = TOWER_ATTENTION;
    if is_tower && fused == of_tower {
        return Some((block, parts, kind));
    }
    let (_, projections) = FUSED.iter().find(|(name, _)| *name == fused)?;
    Some((block, projections, kind))
}

/// The parameters that a fused tensor with this canonical name has one below the other, each with its share of the
/// rows; `None` if it is one parameter.
fn stored_together(name: &str, counts: HeadCounts) -> Option<Vec<(String, usize)>> {
    let is_tower = VisionNames::of_parameter(name).is_some();
    let (block, projections, kind) = fused_projections(name, is_tower)?;
    let share = |projection: &str| match projection {
        "q_proj" if !is_tower => counts.heads,
        "k_proj" | "v_proj" if !is_tower => counts.kv_heads,
        _ => 1,
    };
    let part = |projection: &&str| (format!("{block}.{projection}.{kind}"), share(projection));
    Some(projections.iter().map(part).collect())
}

/// The parameters that a tensor with this canonical name has one below the other: several for a fused one.
pub(in crate::weights) fn parameters_of(name: &str, parameters: &Parameters) -> Vec<String> {
    let fused = if parameters.find(name).is_some() { None } else { fused(name, parameters) };
    let parts = fused.map_or_else(Vec::new, |mapping| mapping.parts);
    match parts.is_empty() {
        true => vec![name.to_string()],
        false => parts.into_iter().map(|part| part.parameter).collect(),
    }
}

/// The block of the projections in the fused tensor that a parameter of this name is in, the fused tensor's module,
/// these projections, and what it is of them: their weight or bias. `None` if it is in none.
fn fused_with(name: &str) -> Option<(&str, &'static str, &'static [&'static str], &str)> {
    let (module, kind) = name.rsplit_once('.')?;
    let (block, projection) = module.rsplit_once('.')?;
    let (fused, projections) = FUSED.iter().find(|(_, projections)| projections.contains(&projection))?;
    Some((block, fused, projections, kind))
}

/// The other parameters that a matrix has with this one, because their projections have the same input.
pub(in crate::weights) fn stored_with(name: &str) -> Vec<String> {
    let Some((block, _, projections, kind)) = fused_with(name) else { return Vec::new() };
    let all = projections.iter().map(|projection| format!("{block}.{projection}.{kind}"));
    all.filter(|other| other != name).collect()
}

/// Bytes in float32 of the largest tensor that can be pushed, fused ones among them.
pub(super) fn largest_tensor_bytes(parameters: &Parameters) -> u64 {
    let elements = |shape: &[usize]| shape.iter().product::<usize>();
    let whole = |name: &str| {
        let fused = FUSED.iter().copied().chain([TOWER_ATTENTION]).filter_map(|(fused, projections)| {
            let first = projections[0];
            let name = name.contains(first).then(|| name.replace(&format!(".{first}."), &format!(".{fused}.")))?;
            resolve(&name, parameters)?.shape
        });
        let of_experts = || {
            let (experts, projection) = name.split_once(&format!(".{EXPERTS}.0."))?;
            // Once for all projections of all experts of a layer.
            projection.strip_prefix(FUSED_EXPERTS[0].1[0])?;
            let of = |(fused, _)| resolve(&format!("{experts}.{EXPERTS}.{fused}"), parameters)?.shape;
            FUSED_EXPERTS.into_iter().filter_map(of).map(|shape| elements(&shape)).max()
        };
        fused.map(|shape| elements(&shape)).chain(of_experts()).max().unwrap_or(0)
    };
    let largest = parameters.pushable().map(|spec| elements(&spec.shape).max(whole(&spec.name))).max();
    (largest.unwrap_or(0) as u64).saturating_mul(size_of::<f32>() as u64)
}

/// The parameter whose name has most of its beginning and end in common with `name`, if that is at least three quarters
/// of it.
pub(in crate::weights) fn nearest<'a>(name: &str, parameters: &'a Parameters) -> Option<&'a str> {
    let name = plain_name(name);
    let common = |known: &str| {
        let start = known.bytes().zip(name.bytes()).take_while(|(a, b)| a == b).count();
        let end = known.bytes().rev().zip(name.bytes().rev()).take_while(|(a, b)| a == b).count();
        (start + end).min(known.len())
    };
    let known = parameters.iter().map(|spec| spec.name.as_str()).max_by_key(|known| common(known))?;
    (common(known) * 4 >= known.len() * 3).then_some(known)
}
