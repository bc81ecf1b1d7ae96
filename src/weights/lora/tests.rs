//! Adapters, merged on every instruction set and compared with PEFT, and adapters that must be refused.

mod fused;
mod manifest;
mod patterns;
mod peft;
mod vision;

use half::{bf16, f16};
use rand::rngs::StdRng;
use rand::{Rng, SeedableRng};

use rollout_kernels::cpu::Isa;

use super::*;
use crate::memory::Traffic;
use crate::weights::parameters::{Dtype, ParamSpec, Parameters, ShardRule, Slice, TensorData, matrix_shape};

/// An adapter as it is pushed.
#[derive(Clone)]
struct Push {
    config: String,
    tensors: Vec<(String, Dtype, Vec<usize>)>,
    values: Vec<TensorData<'static>>,
}

impl Push {
    fn new(config: &str) -> Self {
        Self { config: config.to_string(), tensors: Vec::new(), values: Vec::new() }
    }

    fn add(&mut self, name: &str, shape: &[usize], values: TensorData<'static>) {
        self.tensors.push((name.to_string(), values.dtype(), shape.to_vec()));
        self.values.push(values);
    }

    /// Adds tensors of random values.
    fn random(mut self, rng: &mut StdRng, dtype: Dtype, tensors: &[(&str, &[usize])]) -> Self {
        for (name, shape) in tensors {
            let name = format!("base_model.model.{name}");
            let values = (0..shape.iter().product()).map(|_| rng.random_range(-1.0_f32..1.0));
            let values = match dtype {
                Dtype::F32 => TensorData::F32(values.collect()),
                Dtype::F16 => TensorData::F16(values.map(f16::from_f32).collect()),
                Dtype::Bf16 => TensorData::Bf16(values.map(bf16::from_f32).collect()),
            };
            self.add(&name, shape, values);
        }
        self
    }

    fn check(&self, parameters: &Parameters) -> Result<AdapterSpec> {
        let tensors = self.tensors.iter().map(|(name, dtype, shape)| AdapterTensor { name, dtype: *dtype, shape });
        let tensors: Vec<_> = tensors.collect();
        AdapterSpec::new(&self.config, &tensors, parameters, &Traffic::new(u64::MAX))
    }

    fn build(&self, parameters: &Parameters) -> Adapter {
        let spec = self.check(parameters).unwrap();
        let bytes = spec.bytes();
        let adapter = spec.build(&|i| self.values[i].clone());
        assert_eq!(adapter.bytes(), bytes, "bytes of the spec and of the adapter");
        adapter
    }
}

fn parameters(specs: &[(&str, &[usize])], dtype: Dtype, tied_head: bool) -> Parameters {
    let specs = specs.iter().map(|(name, shape)| ParamSpec::new(*name, *shape, ShardRule::Replicated));
    Parameters::new(specs.collect(), dtype, 1, tied_head)
}

fn rng(seed: u64) -> StdRng {
    println!("seed {seed}");
    StdRng::seed_from_u64(seed)
}

fn bits(values: &[f32]) -> Vec<u32> {
    values.iter().map(|x| x.to_bits()).collect()
}

fn random_range(rng: &mut StdRng, len: usize) -> std::ops::Range<usize> {
    let start = rng.random_range(0..=len);
    start..rng.random_range(start..=len)
}

const OUT: &str = "model.layers.0.self_attn.o_proj";

/// A model of one adapted layer `[rows, cols]` with a bias and an embedding `[vocabulary, cols]`, and an adapter of all
/// three.
struct Random {
    parameters: Parameters,
    adapter: Adapter,
    shapes: Vec<(String, Vec<usize>)>,
}

impl Random {
    fn new(rng: &mut StdRng, dora: bool) -> Self {
        let (rows, cols, vocabulary) = (rng.random_range(1..40), rng.random_range(1..90), rng.random_range(1..50));
        let rank = rng.random_range(1..9);
        let dtype = [Dtype::F32, Dtype::F16, Dtype::Bf16][rng.random_range(0..3)];
        let serving = [Dtype::F32, Dtype::Bf16][rng.random_range(0..2)];
        let (weight, bias) = (format!("{OUT}.weight"), format!("{OUT}.bias"));
        let mut shapes = vec![(weight, vec![rows, cols]), (bias, vec![rows])];
        let factor = |part: &str| format!("{OUT}.{part}");
        let (a, b, of_b) = (factor("lora_A.weight"), factor("lora_B.weight"), factor("lora_B.bias"));
        let magnitude = factor("lora_magnitude_vector");
        let mut tensors: Vec<(&str, &[usize])> = Vec::new();
        let (a_shape, b_shape, vector) = ([rank, cols], [rows, rank], [rows]);
        tensors.extend([(a.as_str(), &a_shape[..]), (b.as_str(), &b_shape[..])]);
        let (ea, eb) = ([rank, vocabulary], [cols, rank]);
        if dora {
            tensors.push((&magnitude, &vector));
        } else {
            shapes.push(("model.embed_tokens.weight".into(), vec![vocabulary, cols]));
            tensors.push((&of_b, &vector));
            tensors.push(("model.embed_tokens.lora_embedding_A", &ea));
            tensors.push(("model.embed_tokens.lora_embedding_B", &eb));
        }
        let config = format!(
            r#"{{"peft_type": "LORA", "r": {rank}, "lora_alpha": 3, "use_dora": {dora}, "lora_bias": {}}}"#,
            !dora
        );
        let specs: Vec<_> = shapes.iter().map(|(name, shape)| (name.as_str(), shape.as_slice())).collect();
        let parameters = parameters(&specs, serving, false);
        let adapter = Push::new(&config).random(rng, dtype, &tensors).build(&parameters);
        Self { parameters, adapter, shapes }
    }
}

#[test]
fn a_slice_of_the_merge_is_the_merge_of_the_slice_on_every_isa() {
    for seed in 0..300 {
        let mut rng = rng(seed);
        let model = Random::new(&mut rng, seed % 3 == 0);
        for (name, shape) in &model.shapes {
            let (rows, cols) = matrix_shape(shape);
            let base: Vec<f32> = (0..rows * cols).map(|_| rng.random_range(-1.0..1.0)).collect();
            let mut whole = base.clone();
            model.adapter.merge("auto", name, &Slice::whole(shape), &mut whole);
            assert_eq!(whole == base, !model.adapter.touches(name), "{name} of {shape:?}");
            for isa in Isa::available() {
                let rows = random_range(&mut rng, rows);
                let whole_rows = model.adapter.change(name).is_some_and(WeightChange::needs_whole_rows);
                let cols_of_slice = if whole_rows { 0..cols } else { random_range(&mut rng, cols) };
                let slice = Slice { rows, cols: cols_of_slice };
                let cut = |values: &[f32]| -> Vec<f32> {
                    let rows = values.chunks(cols).take(slice.rows.end).skip(slice.rows.start);
                    rows.flat_map(|row| row[slice.cols.clone()].to_vec()).collect()
                };
                let mut part = cut(&base);
                model.adapter.merge(isa.name(), name, &slice, &mut part);
                let context = format!("{name} of {shape:?}, {slice:?}, {}", isa.name());
                assert_eq!(bits(&part), bits(&cut(&whole)), "{context}");
            }
        }
        assert!(model.parameters.len() >= 2);
    }
}

#[test]
fn an_adapter_of_zeros_leaves_the_bits_of_the_base() {
    for seed in 0..20 {
        let mut rng = rng(seed);
        let (rows, cols, rank) = (rng.random_range(1..40), rng.random_range(1..90), rng.random_range(1..9));
        let weight = format!("{OUT}.weight");
        let parameters = parameters(&[(&weight, &[rows, cols])], Dtype::Bf16, false);
        let config = format!(r#"{{"peft_type": "LORA", "r": {rank}}}"#);
        let mut push =
            Push::new(&config).random(&mut rng, Dtype::F32, &[(&format!("{OUT}.lora_A.weight"), &[rank, cols])]);
        let name = format!("base_model.model.{OUT}.lora_B.weight");
        push.add(&name, &[rows, rank], TensorData::F32(vec![0.0; rows * rank].into()));
        let base: Vec<f32> = (0..rows * cols).map(|_| rng.random_range(-1.0..1.0)).collect();
        let mut merged = base.clone();
        push.build(&parameters).merge("auto", &weight, &Slice::whole(&[rows, cols]), &mut merged);
        assert_eq!(bits(&merged), bits(&base));
    }
}

#[test]
fn no_adapter_and_an_empty_push_are_the_base() {
    let parameters = parameters(&[("model.norm.weight", &[3])], Dtype::F32, false);
    for adapter in [Adapter::none(), Push::new("").build(&parameters)] {
        let mut values = [1.0, 2.0, 3.0];
        adapter.merge("auto", "model.norm.weight", &Slice::whole(&[3]), &mut values);
        assert_eq!(values, [1.0, 2.0, 3.0]);
        assert_eq!((adapter.bytes(), adapter.rank(), adapter.parameters().count()), (0, 0, 0));
        adapter.check_unmerged().unwrap();
    }
}

#[test]
fn a_delta_that_underflows_keeps_the_sign_of_a_zero() {
    let weight = format!("{OUT}.weight");
    let parameters = parameters(&[(&weight, &[1, 1])], Dtype::Bf16, false);
    let mut push = Push::new(r#"{"peft_type": "LORA", "r": 1}"#);
    for (part, value) in [("lora_A", 1e-30), ("lora_B", -1e-30)] {
        let name = format!("base_model.model.{OUT}.{part}.weight");
        push.add(&name, &[1, 1], TensorData::Bf16(vec![bf16::from_f32(value)].into()));
    }
    let mut values = [-0.0];
    push.build(&parameters).merge("auto", &weight, &Slice::whole(&[1, 1]), &mut values);
    assert_eq!(bits(&values), bits(&[-0.0]));
}
