use super::super::testing::require::{left_out, require};
use super::super::testing::{Random, bits};
use super::*;

/// Random tiles for `R` tiles of activations and two panels, with zeros, denormals and large values among them.
struct Tiles {
    shape: TileShape,
    steps: usize,
    x: Vec<Vec<f32>>,
    w: [Vec<bf16>; TILE_PANELS],
}

fn value(random: &mut Random) -> bf16 {
    let normal = random.normals(1, 1.0)[0];
    bf16::from_f32(match random.below(12) {
        0 => 0.0,
        1 => normal * 1e-39,
        2 => normal * 1e-20,
        3 => normal * 1e15,
        _ => normal,
    })
}

fn tiles(random: &mut Random, r: usize, shape: TileShape, steps: usize) -> Tiles {
    let pair = |random: &mut Random| {
        let [first, second] = [value(random), value(random)].map(|x| u32::from(x.to_bits()));
        f32::from_bits(first | second << 16)
    };
    let x = (0..r).map(|_| (0..steps * shape.activations()).map(|_| pair(random)).collect()).collect();
    let w = std::array::from_fn(|_| (0..steps * shape.weights()).map(|_| value(random)).collect());
    Tiles { shape, steps, x, w }
}

impl Tiles {
    fn products<const R: usize>(&self, isa: Isa) -> Vec<f32> {
        let operands = TileOperands::<R> {
            x: std::array::from_fn(|r| self.x[r].as_ptr()),
            x_step: self.shape.activations(),
            w: std::array::from_fn(|panel| self.w[panel].as_ptr()),
            steps: self.steps,
        };
        let mut sums = vec![f32::NAN; R * TILE_PANELS * TILE_SUMS];
        // SAFETY: both have `steps` tiles.
        unsafe { TileUnit::new(isa, self.shape).multiply(&operands, &mut sums) };
        sums
    }

    /// One sum in the order that the module documents.
    fn expected(&self, tile: usize, panel: usize, row: usize, column: usize) -> f32 {
        let flushed = |x: f32| if x.is_subnormal() { 0.0_f32.copysign(x) } else { x };
        let (x, w) = (&self.x[tile], &self.w[panel]);
        (0..self.steps).fold(0.0, |sum, step| {
            let mut apart = [0.0_f32; 2];
            for pair in 0..self.shape.pairs {
                let x = x[step * self.shape.activations() + row * LANES + pair].to_bits();
                let w = &w[step * self.shape.weights() + 2 * (pair * LANES + column)..][..2];
                for (i, apart) in apart.iter_mut().enumerate() {
                    let x = f32::from_bits(if i == 0 { x << 16 } else { x & 0xffff_0000 });
                    *apart = flushed(flushed(x).mul_add(flushed(w[i].to_f32()), *apart));
                }
            }
            flushed(sum + flushed(apart[0] + apart[1]))
        })
    }
}

fn shape(random: &mut Random) -> TileShape {
    TileShape { rows: random.between(1, TILE_ROWS), pairs: random.between(1, TILE_PAIRS) }
}

#[test]
fn tiles_of_a_reduction_have_one_size_the_most_that_divides_it() {
    let cases = [(1, 1), (4, 4), (16, 16), (17, 1), (36, 12), (56, 14), (288, 16), (304, 16), (687, 3)];
    for (pairs, expected) in cases {
        assert_eq!(TileShape::new(40, pairs), TileShape { rows: 16, pairs: expected });
        assert_eq!(TileShape::new(3, pairs), TileShape { rows: 3, pairs: expected });
    }
}

#[test]
fn the_emulation_has_the_documented_order() {
    let isa = Isa::from_name("amx_emulated").expect("every processor can");
    for seed in 0..40 {
        let mut random = Random::new(seed);
        let (shape, steps) = (shape(&mut random), random.between(1, 5));
        let tiles = tiles(&mut random, 2, shape, steps);
        let found = tiles.products::<2>(isa);
        for (i, found) in found.as_chunks::<LANES>().0.iter().enumerate() {
            let (tile, panel, row) = (i / TILE_ROWS / TILE_PANELS, i / TILE_ROWS % TILE_PANELS, i % TILE_ROWS);
            if row < shape.rows {
                let expected: Vec<f32> = (0..LANES).map(|column| tiles.expected(tile, panel, row, column)).collect();
                assert_eq!(bits(found), bits(&expected), "seed {seed}, {shape:?}, {steps} steps, row {row}");
            }
        }
    }
}

#[test]
fn the_tile_unit_is_its_emulation() {
    let real = Isa::from_name("amx");
    require!(real.is_some() || left_out("ROLLOUT_REQUIRE_ISA", "this processor lacks AMX"));
    let (real, emulated) = (real.expect("it is there"), Isa::from_name("amx_emulated").expect("every processor can"));
    for seed in 0..2000 {
        let mut random = Random::new(seed);
        let (shape, steps) = (shape(&mut random), random.between(1, 20));
        let rows = |products: Vec<f32>| -> Vec<u32> {
            let of_tile = |tile: &[f32]| bits(&tile[..shape.rows * LANES]);
            products.chunks(TILE_SUMS).flat_map(of_tile).collect()
        };
        let tiles = tiles(&mut random, 2, shape, steps);
        let what = format!("seed {seed}, {shape:?}, {steps} steps");
        assert_eq!(rows(tiles.products::<2>(real)), rows(tiles.products::<2>(emulated)), "{what}");
        assert_eq!(rows(tiles.products::<1>(real)), rows(tiles.products::<1>(emulated)), "{what}");
    }
}
