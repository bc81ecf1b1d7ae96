//! The model of the simulation, and everything that trainers push to it: real adapters, tensors and deltas, made once.

use std::sync::Arc;

use rollout_server::weights::{
    Adapter, AdapterTarget, DeclaredPush, Delta, Dtype, ParamSpec, Parameters, ReceiveMode, ReceivingPush, ShardRule,
    Sources, TensorEntry, Tensors, UpdateHeader, UpdateKind, WeightUpdate,
};

/// Number of parameters of the model.
pub const PARAMETERS: usize = 2;
const NAMES: [&str; PARAMETERS] = ["model.layers.0.self_attn.o_proj.weight", "model.layers.1.self_attn.o_proj.weight"];
const SHAPE: [usize; 2] = [5, 3];
/// Bytes of a parameter.
pub const PARAMETER_BYTES: u64 = 60;

/// Names one content. 0 is the checkpoint's, or no adapter.
pub type ContentId = u32;

/// Number of the adapters that trainers push. Those behind them are read when a request names them, each under the
/// name that has its number among these.
pub const PUSHED_ADAPTERS: usize = 4;

/// An adapter, and which parameters it touches.
pub struct PushedAdapter {
    pub adapter: Arc<Adapter>,
    pub touches: [bool; PARAMETERS],
}

pub struct Catalog {
    pub parameters: Arc<Parameters>,
    pub adapters: Vec<PushedAdapter>,
    /// One value of each parameter, alone.
    pub tensors: Vec<[Arc<Tensors>; PARAMETERS]>,
    /// The changes of the first parameter, of the second, or of both.
    pub deltas: Vec<(Arc<Delta>, [bool; PARAMETERS])>,
}

/// Identifiers of adapters, of FULL pushes and of deltas begin here, so that none is another's.
const FULL_IDS: ContentId = 100;
const DELTA_IDS: ContentId = 200;
/// The content of a parameter that an order has left half written.
pub const BROKEN: ContentId = 999;

impl Catalog {
    pub fn new() -> Self {
        let specs = NAMES.map(|name| ParamSpec::new(name, SHAPE.to_vec(), ShardRule::Replicated));
        let parameters = Arc::new(Parameters::new(specs.into(), Dtype::F32, 1, false));
        let read = [&[0, 1][..], &[0], &[1]];
        let adapters = [&[0][..], &[1], &[0, 1], &[0, 1]].into_iter().chain(read);
        let adapters = adapters.enumerate().map(|(i, layers)| {
            let touches = std::array::from_fn(|p| layers.contains(&p));
            PushedAdapter { adapter: adapter(&parameters, layers, 1 + i % 3), touches }
        });
        let tensors = (0..3).map(|_| std::array::from_fn(|p| tensors(&parameters, p)));
        let deltas = [[true, false], [false, true], [true, true]].map(|touches| (delta(&parameters, touches), touches));
        Self { adapters: adapters.collect(), tensors: tensors.collect(), deltas: deltas.into(), parameters }
    }

    /// The number of an adapter, 0 for none.
    pub fn adapter_id(&self, adapter: &Arc<Adapter>) -> ContentId {
        let place = self.adapters.iter().position(|pushed| Arc::ptr_eq(&pushed.adapter, adapter));
        place.map_or(0, |place| place as ContentId + 1)
    }

    /// An adapter that trainers push; `None` for the number of none.
    pub fn pushed(&self, index: usize) -> Option<&Arc<Adapter>> {
        self.adapters[..PUSHED_ADAPTERS].get(index).map(|pushed| &pushed.adapter)
    }

    /// The adapter that is read under this name.
    pub fn read(&self, name: usize) -> &Arc<Adapter> {
        &self.adapters[PUSHED_ADAPTERS + name].adapter
    }

    /// The name under which an adapter is read, if it is.
    pub fn name_of(&self, adapter: ContentId) -> Option<usize> {
        (adapter as usize).checked_sub(PUSHED_ADAPTERS + 1)
    }

    pub fn touches(&self, adapter: ContentId, parameter: usize) -> bool {
        adapter > 0 && self.adapters[adapter as usize - 1].touches[parameter]
    }

    pub fn full_id(&self, push: usize) -> ContentId {
        FULL_IDS + push as ContentId
    }

    /// The numbers of the tensors by parameter; `None` for a parameter that they do not bring.
    pub fn tensor_ids(&self, tensors: &Arc<Tensors>) -> [Option<ContentId>; PARAMETERS] {
        let mut ids = [None; PARAMETERS];
        for (push, of_push) in self.tensors.iter().enumerate() {
            for (id, tensor) in ids.iter_mut().zip(of_push) {
                *id = id.or(Arc::ptr_eq(tensor, tensors).then(|| self.full_id(push)));
            }
        }
        ids
    }

    /// The number of a delta, and which parameters it touches.
    pub fn delta(&self, delta: &Arc<Delta>) -> (ContentId, [bool; PARAMETERS]) {
        let place = self.deltas.iter().position(|known| Arc::ptr_eq(&known.0, delta)).expect("a delta of the catalog");
        (DELTA_IDS + place as ContentId, self.deltas[place].1)
    }

    pub fn parameter(&self, name: &str) -> usize {
        NAMES.iter().position(|known| *known == name).expect("a parameter of the model")
    }
}

fn receive(
    parameters: &Arc<Parameters>,
    kind: UpdateKind,
    config: &str,
    tensors: Vec<(TensorEntry, Vec<u8>)>,
) -> ReceivingPush {
    let is_lora = kind == UpdateKind::Lora;
    let header = UpdateHeader {
        adapter: is_lora.then(|| AdapterTarget { name: "unmerged".into(), expected_generation: None, evicts: false }),
        adapter_config: config.into(),
        ..UpdateHeader::new(kind)
    };
    let mut push = open(parameters, header, &tensors).receive(ReceiveMode::Stage).expect("a push without files");
    for (index, (_, bytes)) in (0..).zip(&tensors) {
        push.write(index, 0, bytes).expect("a tensor of the catalog");
    }
    push
}

fn open(parameters: &Arc<Parameters>, header: UpdateHeader, tensors: &[(TensorEntry, Vec<u8>)]) -> DeclaredPush {
    let entries = tensors.iter().map(|tensor| tensor.0.clone()).collect();
    DeclaredPush::open(Arc::new(header), entries, parameters.clone(), &Sources::default())
        .expect("a push of the catalog")
}

fn entry(name: &str, shape: [usize; 2], payload: Option<(u64, u64)>, bytes: Vec<u8>) -> (TensorEntry, Vec<u8>) {
    let digest = Some(xxhash_rust::xxh3::xxh3_128(&bytes).to_be_bytes());
    let shape = shape.to_vec();
    (TensorEntry { name: name.into(), dtype: Dtype::F32, shape, digest, payload, offset: 0, allocation: None }, bytes)
}

fn ones(count: usize) -> Vec<u8> {
    1.0_f32.to_le_bytes().repeat(count)
}

fn adapter(parameters: &Arc<Parameters>, layers: &[usize], rank: usize) -> Arc<Adapter> {
    let config = format!(r#"{{"peft_type": "LORA", "r": {rank}, "lora_alpha": 1, "target_modules": ["o_proj"]}}"#);
    let tensors = layers.iter().flat_map(|&layer| {
        let module = format!("base_model.model.{}", NAMES[layer].trim_end_matches(".weight"));
        let [rows, columns] = SHAPE;
        [
            entry(&format!("{module}.lora_A.weight"), [rank, columns], None, ones(rank * columns)),
            entry(&format!("{module}.lora_B.weight"), [rows, rank], None, ones(rows * rank)),
        ]
    });
    match receive(parameters, UpdateKind::Lora, &config, tensors.collect()).finish().expect("an adapter").update {
        WeightUpdate::Lora(adapter) => adapter,
        other => panic!("{other:?}"),
    }
}

/// A value of one parameter, as a push in place gives it to the engine.
fn tensors(parameters: &Arc<Parameters>, parameter: usize) -> Arc<Tensors> {
    let all = NAMES.map(|name| entry(name, SHAPE, None, ones(SHAPE[0] * SHAPE[1])));
    let declared = open(parameters, UpdateHeader::new(UpdateKind::Full), &all);
    let mut push = declared.receive(ReceiveMode::InPlace).expect("a push without files");
    let mut taken = None;
    for (index, (_, bytes)) in all.iter().enumerate() {
        taken = push.write(index as u32, 0, bytes).expect("a tensor of the catalog");
        if index == parameter {
            break;
        }
    }
    Arc::new(taken.expect("a whole tensor"))
}

fn delta(parameters: &Arc<Parameters>, touches: [bool; PARAMETERS]) -> Arc<Delta> {
    let tensors = NAMES.iter().zip(touches).filter(|(_, touched)| *touched).map(|(name, _)| {
        let bytes = delta_payload();
        let payload = Some((1, bytes.len() as u64));
        entry(name, SHAPE, payload, bytes)
    });
    match receive(parameters, UpdateKind::Delta, "", tensors.collect()).finish().expect("a delta").update {
        WeightUpdate::Delta(delta) => delta,
        other => panic!("{other:?}"),
    }
}

/// One changed element: the gap before its index, and its value.
fn delta_payload() -> Vec<u8> {
    let raw = [0_u32.to_le_bytes(), 1.0_f32.to_le_bytes()].concat();
    zstd::bulk::compress(&raw, 1).expect("a payload of eight bytes")
}
