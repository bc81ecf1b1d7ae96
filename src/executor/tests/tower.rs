//! The vision tower: its embeddings against transformers, and the same bits in chunks, slices and on several ranks.

use std::ops::Range;

use rand::Rng;
use rollout_kernels::host::with_f32;
use rollout_kernels::{Backend, StorageDtype};
use safetensors::SafeTensors;

use super::harness::{Setup, fixture, random};
use crate::comm::{Communicator, LocalGroup, SingleRank};
use crate::executor::RankWeights;
use crate::model::config::VisionConfig;
use crate::model::{Build, TowerShape, TowerWorkspace};
use crate::types::{Picture, PictureEncode};

const MODELS: [&str; 4] = ["qwen2_5_vl", "qwen2_5_vl-tied", "internvl3", "internvl3-chat"];
const MAX_IMAGE_TOKENS: usize = 64;
const LAYER_ROWS: usize = 1024;
/// Rows of the embedding buffer before those of a picture.
const OFFSET: usize = 3;

/// A picture with what transformers makes of it.
struct Encoded {
    name: String,
    picture: Picture,
    features: Vec<f32>,
}

fn encoded(model: &str) -> Vec<Encoded> {
    let file = std::fs::read(fixture(model).join("reference.safetensors")).unwrap();
    let tensors = SafeTensors::deserialize(&file).unwrap();
    let mut names: Vec<&str> = tensors.names().into_iter().filter(|name| name.starts_with("rgb_")).collect();
    names.sort_unstable();
    let read = |name: &str| {
        let rgb = tensors.tensor(name).unwrap();
        // The first axis is that of tiles, if there are some.
        let (tiles, sides) = rgb.shape().split_at(rgb.shape().len() - 3);
        let (height, width) = (sides[0] as u32, sides[1] as u32);
        let tiles = tiles.first().map_or(1, |tiles| *tiles as u32);
        let picture = Picture::new("image", width, height, tiles, rgb.data()).unwrap();
        let features = tensors.tensor(&name.replace("rgb_", "features_")).unwrap();
        let features = features.data().as_chunks::<4>().0.iter().map(|bytes| f32::from_le_bytes(*bytes)).collect();
        Encoded { name: name.to_string(), picture, features }
    };
    names.into_iter().map(read).collect()
}

fn random_picture(rng: &mut impl Rng, config: &VisionConfig) -> Picture {
    let (height, width, tiles) = match config.tile_side() {
        Some(side) => {
            let most = config.most_tokens().min(MAX_IMAGE_TOKENS);
            (side, side, rng.random_range(1..=most / config.fewest_tokens()))
        }
        None => {
            let rows = rng.random_range(1..=8);
            let columns = rng.random_range(1..=MAX_IMAGE_TOKENS / rows);
            (rows * config.token_side(), columns * config.token_side(), 1)
        }
    };
    let rgb: Vec<u8> = (0..3 * width * height * tiles).map(|_| rng.random()).collect();
    Picture::new("image", width as u32, height as u32, tiles as u32, rgb).unwrap()
}

fn tokens(picture: &Picture, config: &VisionConfig) -> usize {
    let [rows, columns] = config.grid("image", picture).unwrap();
    rows * columns
}

/// The embeddings of pictures on one rank, each encoded in slices of so many blocks. The buffers hold pictures of at
/// most `most` tokens, and chunks of at most `layer_rows` rows.
fn encode_on(
    setup: &Setup,
    build: &Build,
    comm: &dyn Communicator,
    pictures: &[Picture],
    (most, layer_rows): (usize, usize),
    slice: usize,
) -> Vec<Vec<f32>> {
    let weights = setup.weights_of(build);
    let ops = build.device.ops();
    let config = setup.config.vision.clone().unwrap();
    let shape = TowerShape {
        config: config.clone(),
        build: build.clone(),
        max_image_tokens: most,
        embedding_rows: OFFSET + MAX_IMAGE_TOKENS,
        layer_rows,
    };
    let mut workspace = TowerWorkspace::new(&shape).unwrap();
    let encode = |picture: &Picture| {
        let rows = OFFSET..OFFSET + tokens(picture, &config);
        for first in (0..config.depth).step_by(slice) {
            let blocks = first..config.depth.min(first + slice);
            let encode = PictureEncode { picture: picture.clone(), blocks, rows: rows.clone() };
            tower(&weights, &ops, comm, &mut workspace, &encode);
        }
        read(&workspace, rows)
    };
    pictures.iter().map(encode).collect()
}

fn tower(
    weights: &RankWeights,
    ops: &rollout_kernels::Ops,
    comm: &dyn Communicator,
    workspace: &mut TowerWorkspace,
    encode: &PictureEncode,
) {
    weights.model().tower.as_ref().unwrap().encode(ops, comm, workspace, encode).unwrap();
}

fn read(workspace: &TowerWorkspace, rows: Range<usize>) -> Vec<f32> {
    let rows = workspace.embeddings().narrow(0, rows.start, rows.len()).unwrap();
    with_f32(&rows, <[f32]>::to_vec).unwrap()
}

/// The embeddings of pictures on `world` ranks; each rank has all of them.
fn encode(backend: Backend, model: &str, dtype: StorageDtype, world: usize, pictures: &[Picture]) -> Vec<Vec<f32>> {
    let setup = Setup::open_on(backend, &fixture(model), dtype, world);
    let run = |rank: usize, comm: &dyn Communicator| {
        encode_on(&setup, &setup.build(rank), comm, pictures, (MAX_IMAGE_TOKENS, LAYER_ROWS), usize::MAX)
    };
    if world == 1 {
        return run(0, &SingleRank);
    }
    let of_ranks = std::thread::scope(|scope| {
        let ranks = LocalGroup::create(world).into_iter().enumerate();
        let threads: Vec<_> = ranks.map(|(rank, comm)| scope.spawn(move || run(rank, &comm))).collect();
        threads.into_iter().map(|thread| thread.join().unwrap()).collect::<Vec<_>>()
    });
    assert!(of_ranks.windows(2).all(|pair| pair[0] == pair[1]), "every rank has the same embeddings");
    of_ranks.into_iter().next().unwrap()
}

/// The largest difference, in units of the largest value.
fn distance(found: &[f32], expected: &[f32]) -> f32 {
    assert_eq!(found.len(), expected.len());
    let largest = |values: &mut dyn Iterator<Item = f32>| values.map(f32::abs).fold(0.0, f32::max);
    let apart = largest(&mut found.iter().zip(expected).map(|(found, expected)| found - expected));
    apart / largest(&mut expected.iter().copied())
}

#[test]
fn embeddings_are_those_of_transformers_in_float32() {
    for model in MODELS {
        let references = encoded(model);
        assert!(references.len() > 5, "{model} has {} pictures", references.len());
        let pictures: Vec<Picture> = references.iter().map(|reference| reference.picture.clone()).collect();
        for backend in [Backend::Cpu, Backend::Reference] {
            let found = encode(backend, model, StorageDtype::F32, 1, &pictures);
            for (reference, found) in references.iter().zip(&found) {
                let apart = distance(found, &reference.features);
                assert!(apart < 1e-5, "{model} {:?} on {backend:?}: {apart:e} apart", reference.name);
            }
        }
    }
}

#[test]
fn embeddings_have_the_same_bits_on_any_number_of_ranks() {
    let mut rng = random(11);
    for model in MODELS {
        for dtype in super::harness::DTYPES {
            let setup = Setup::open(&fixture(model), dtype, 1);
            let config = setup.config.vision.as_ref().unwrap();
            let pictures: Vec<Picture> = (0..3).map(|_| random_picture(&mut rng, config)).collect();
            let expected = encode(Backend::Cpu, model, dtype, 1, &pictures);
            for world in [2, 4].into_iter().filter(|&world| setup.config.check_tensor_parallel(world).is_ok()) {
                let found = encode(Backend::Cpu, model, dtype, world, &pictures);
                assert!(found == expected, "{model} {dtype:?} on {world} ranks");
            }
        }
    }
}

#[test]
fn embeddings_have_the_same_bits_in_any_chunk_and_slice_and_beside_any_other_picture() {
    let mut rng = random(12);
    for model in MODELS {
        let setup = Setup::open(&fixture(model), StorageDtype::F32, 1);
        let config = setup.config.vision.as_ref().unwrap();
        let pictures: Vec<Picture> = (0..4).map(|_| random_picture(&mut rng, config)).collect();
        let build = setup.build(0);
        let run = |pictures: &[Picture], most, slice| encode_on(&setup, &build, &SingleRank, pictures, most, slice);
        let expected = run(&pictures, (MAX_IMAGE_TOKENS, LAYER_ROWS), config.depth);
        for slice in 1..config.depth {
            let found = run(&pictures, (MAX_IMAGE_TOKENS, LAYER_ROWS), slice);
            assert!(found == expected, "{model}: {slice} blocks a step");
        }
        for layer_rows in [1, 90] {
            let found = run(&pictures, (MAX_IMAGE_TOKENS, layer_rows), 1);
            assert!(found == expected, "{model}: chunks of {layer_rows} rows");
        }
        for (picture, expected) in pictures.iter().zip(&expected) {
            // The smallest buffers that hold the picture have chunks of the fewest rows.
            let alone = run(std::slice::from_ref(picture), (tokens(picture, config), LAYER_ROWS), 1);
            assert!(alone[0] == *expected, "{model}: {picture:?} alone");
        }
    }
}
