//! Resident adapters, which stay beside the base weights: `out += b (a x)` for the rows of the batch that use one.
//!
//! The bits of a row depend only on its own inputs and its adapter, on any number of ranks. Where a layer's input is
//! split over ranks, `a x` has the layer's reduction order and is summed over the ranks. Every reduction over the rank
//! of the factors is whole on each of them.

use std::collections::{BTreeMap, HashMap, HashSet};

use candle_core::Tensor;
use rollout_kernels::{Activations, AdapterFactors, AdapterRows, MatrixShape, Ops, StorageDtype, TensorView, UpFactor};

use crate::comm::Communicator;
use crate::error::{Error, Result};
use crate::model::{AdapterDeltas, Build, Decoder, Parameterized};
use crate::weights::{Adapter, Factors, ParamSpec, ShardRule};

/// Rows that go through an adapter at once: enough that its factors are read from the cache.
const ROWS_AT_ONCE: usize = 128;

/// Values in each buffer (4 MiB), unless a single row is longer.
const BUFFER_VALUES: usize = 1 << 20;

/// Bytes that a matrix is rounded up to in memory.
const PAGE: usize = 4096;

/// Bytes that `adapters` resident adapters of rank `rank` take on one rank of the model, if each has float32 factors
/// for all linear layers; the buffers are included.
///
/// # Errors
/// `Config` if a parameter cannot be divided among the ranks.
pub fn resident_adapter_bytes(decoder: &Decoder, build: &Build, rank: usize, adapters: usize) -> Result<u64> {
    if adapters == 0 {
        return Ok(0);
    }
    let bytes = |n: usize, k: usize| build.device.matrix(float32(n, k, 1)).bytes().next_multiple_of(PAGE);
    let mut one = 0;
    for module in decoder.target_modules() {
        let mut columns = 0;
        for (spec, _) in &module.weights {
            let slice = build.partition.slice(spec)?;
            columns = slice.cols.len();
            one += bytes(slice.rows.len(), rank);
        }
        one += bytes(module.weights.len() * rank, columns);
    }
    Ok((adapters * one + 3 * 4 * buffer_values(decoder, build)?) as u64)
}

/// The resident adapters on one rank of the model, by generation.
pub struct ResidentAdapters {
    build: Build,
    generations: BTreeMap<u64, HashMap<String, ModuleFactors>>,
    /// `None` while there is no adapter, and while the workspace is released.
    buffers: Option<AdapterBuffers>,
}

/// The factors of one adapter for one target module, which is known by its name.
struct ModuleFactors {
    /// Float32; those of `up` are multiplied by the scaling and rounded.
    factors: AdapterFactors,
    /// Whether the module's input is split over the model's ranks, so that `a x` must be summed over them.
    is_split: bool,
}

/// Scratch for some rows at a time, flat: the input `x`, `a x` and `b (a x)`.
struct AdapterBuffers {
    x: Activations,
    ranks: Activations,
    y: Activations,
    values: usize,
}

/// The adapters that one batch uses, each with the rows that use it.
pub struct BatchAdapters<'a> {
    groups: Vec<(&'a HashMap<String, ModuleFactors>, Vec<u32>)>,
    buffers: &'a AdapterBuffers,
}

impl ResidentAdapters {
    pub fn new(build: Build) -> Self {
        Self { build, generations: BTreeMap::new(), buffers: None }
    }

    /// Checks that each parameter that `adapter` changes is a weight of a target module.
    ///
    /// # Errors
    /// `InvalidArgument` naming the first one that is not.
    pub fn check(decoder: &Decoder, adapter: &Adapter) -> Result<()> {
        let modules = decoder.target_modules();
        let weights: HashSet<&str> =
            modules.iter().flat_map(|module| &module.weights).map(|(spec, _)| spec.name.as_str()).collect();
        match adapter.parameters().find(|name| !weights.contains(name)) {
            None => Ok(()),
            Some(name) => Err(Error::invalid(
                name,
                "no resident adapter can change this parameter; push this adapter to be merged",
            )),
        }
    }

    /// Makes `adapter` resident under a generation that was never used before. It must have passed
    /// [`ResidentAdapters::check`], and [`Adapter::check_unmerged`].
    pub fn add(&mut self, decoder: &Decoder, generation: u64, adapter: &Adapter) -> Result<()> {
        let mut modules = HashMap::new();
        for module in decoder.target_modules() {
            let adapted: Vec<_> = module
                .weights
                .into_iter()
                .filter_map(|(spec, column)| Some((spec, column, adapter.factors(&spec.name)?)))
                .collect();
            if !adapted.is_empty() {
                modules.insert(module.name.to_owned(), ModuleFactors::new(&self.build, &adapted)?);
            }
        }
        self.ensure_buffers(decoder)?;
        self.generations.insert(generation, modules);
        Ok(())
    }

    pub fn remove(&mut self, generation: u64) {
        self.generations.remove(&generation);
        if self.generations.is_empty() {
            self.buffers = None;
        }
    }

    /// Allocates the buffers, if there are adapters that need them.
    pub fn restore_buffers(&mut self, decoder: &Decoder) -> Result<()> {
        if self.generations.is_empty() { Ok(()) } else { self.ensure_buffers(decoder) }
    }

    fn ensure_buffers(&mut self, decoder: &Decoder) -> Result<()> {
        if self.buffers.is_none() {
            self.buffers = Some(AdapterBuffers::new(&self.build, buffer_values(decoder, &self.build)?)?);
        }
        Ok(())
    }

    /// Frees the buffers.
    pub fn release_buffers(&mut self) {
        self.buffers = None;
    }

    /// The adapters that a batch uses, where `rows` has each row's generation; `None` if no row uses one.
    ///
    /// # Panics
    /// If one is not resident, or the buffers are released.
    pub fn of_rows(&self, rows: &[Option<u64>]) -> Option<BatchAdapters<'_>> {
        let mut groups: BTreeMap<u64, Vec<u32>> = BTreeMap::new();
        for (row, generation) in rows.iter().enumerate() {
            if let Some(generation) = generation {
                groups.entry(*generation).or_default().push(row as u32);
            }
        }
        let modules = |generation| {
            self.generations.get(&generation).unwrap_or_else(|| panic!("adapter {generation} is not resident"))
        };
        let groups: Vec<_> = groups.into_iter().map(|(generation, rows)| (modules(generation), rows)).collect();
        if groups.is_empty() {
            return None;
        }
        Some(BatchAdapters { groups, buffers: self.buffers.as_ref().expect("a step has its buffers") })
    }
}

impl ModuleFactors {
    /// Each adapted projection comes with its first column in the module's output.
    fn new(build: &Build, adapted: &[(&ParamSpec, usize, Factors<'_>)]) -> Result<Self> {
        let is_split = adapted.iter().any(|(spec, ..)| spec.shard == ShardRule::Columns);
        let ranks = adapted.iter().map(|(_, _, factors)| factors.rank).sum();
        let columns = build.partition.slice(adapted[0].0)?.cols;
        let whole = adapted[0].0.shape[1];
        let leaves = if is_split { build.partition.leaves(whole) } else { 1 };
        let mut a = build.device.zeros(float32(ranks, columns.len(), leaves))?;
        let (mut up, mut first_rank) = (Vec::new(), 0);
        for (spec, first_column, factors) in adapted {
            for (i, row) in factors.a.chunks_exact(whole).enumerate() {
                a.write_rows(first_rank + i, TensorView::F32(&row[columns.clone()]));
            }
            let rows = build.partition.slice(spec)?.rows;
            let scaled: Vec<f32> = factors.b[rows.start * factors.rank..rows.end * factors.rank]
                .iter()
                .map(|x| x * factors.scaling)
                .collect();
            let mut b = build.device.zeros(float32(rows.len(), factors.rank, 1))?;
            b.write_rows(0, TensorView::F32(&scaled));
            up.push(UpFactor { b, first_rank, first_column: *first_column });
            first_rank += factors.rank;
        }
        let is_split = is_split && !build.partition.is_whole();
        Ok(Self { factors: AdapterFactors { a, up }, is_split })
    }

    /// `out[rows] += b (a x[rows])`.
    fn add(
        &self,
        ops: &Ops,
        comm: &dyn Communicator,
        buffers: &AdapterBuffers,
        rows: &[u32],
        x: &Tensor,
        out: &Tensor,
    ) -> Result<()> {
        let AdapterFactors { a, up } = &self.factors;
        let widest = x.dim(1)?.max(out.dim(1)?).max(a.n());
        for rows in rows.chunks((buffers.values / widest).clamp(1, ROWS_AT_ONCE)) {
            let (first, end) = (rows[0] as usize, rows[rows.len() - 1] as usize + 1);
            // Consecutive rows need no list of rows, which would have to be copied to the device.
            let is_dense = end - first == rows.len();
            let selected = if is_dense {
                x.narrow(0, first, rows.len())?
            } else {
                let selected = AdapterBuffers::rows(&buffers.x, rows.len(), x.dim(1)?)?;
                ops.select_rows(x, rows, &selected)?;
                selected
            };
            let ranks = AdapterBuffers::rows(&buffers.ranks, rows.len(), a.n())?;
            ops.linear(&selected, a, None, &ranks)?;
            if self.is_split {
                comm.all_reduce_sum(&ranks)?;
            }
            for UpFactor { b, first_rank, first_column } in up {
                let y = AdapterBuffers::rows(&buffers.y, rows.len(), b.n())?;
                ops.linear(&ranks.narrow(1, *first_rank, b.k())?, b, None, &y)?;
                let out = out.narrow(1, *first_column, b.n())?;
                match is_dense {
                    true => ops.add(&y, &out.narrow(0, first, rows.len())?)?,
                    false => ops.add_rows(&y, rows, &out)?,
                }
            }
        }
        Ok(())
    }
}

impl AdapterDeltas for BatchAdapters<'_> {
    fn add(&self, ops: &Ops, comm: &dyn Communicator, module: &str, x: &Tensor, out: &Tensor) -> Result<()> {
        let modules = self.groups.iter().filter_map(|(modules, rows)| Some((modules.get(module)?, rows)));
        let modules: Vec<(&ModuleFactors, &Vec<u32>)> = modules.collect();
        if modules.len() > 1 && modules.iter().all(|(module, _)| !module.is_split) {
            let groups = modules.iter().map(|(module, rows)| AdapterRows { factors: &module.factors, rows });
            let AdapterBuffers { x: selected, ranks, y, .. } = self.buffers;
            if ops.add_adapters(x, &groups.collect::<Vec<_>>(), [selected, ranks, y], out)? {
                return Ok(());
            }
        }
        modules.into_iter().try_for_each(|(factors, rows)| factors.add(ops, comm, self.buffers, rows, x, out))
    }
}

impl AdapterBuffers {
    fn new(build: &Build, values: usize) -> Result<Self> {
        let make = || build.device.activations(1, values);
        Ok(Self { x: make()?, ranks: make()?, y: make()?, values })
    }

    /// The beginning of a flat buffer as dense rows.
    fn rows(buffer: &Tensor, rows: usize, width: usize) -> Result<Tensor> {
        Ok(buffer.flatten_all()?.narrow(0, 0, rows * width)?.reshape((rows, width))?)
    }
}

/// The shape of a factor. Factors are float32 whatever the weights are.
fn float32(n: usize, k: usize, leaves: usize) -> MatrixShape {
    MatrixShape { dtype: StorageDtype::F32, n, k, leaves }
}

/// Values in each buffer: [`BUFFER_VALUES`], or the widest single row if that is more.
fn buffer_values(decoder: &Decoder, build: &Build) -> Result<usize> {
    let mut values = BUFFER_VALUES;
    for module in decoder.target_modules() {
        let mut rows = 0;
        for (spec, _) in module.weights {
            let slice = build.partition.slice(spec)?;
            rows += slice.rows.len();
            values = values.max(rows).max(slice.cols.len());
        }
    }
    Ok(values)
}

#[cfg(test)]
mod tests {
    use rollout_kernels::Matrix;

    use super::*;
    use crate::executor::tests::harness::{DTYPES, Setup, fixture};

    #[test]
    fn an_adapter_of_all_layers_takes_what_is_reserved() {
        for (model, layers) in [("llama", ["_proj", "lm_head"]), ("llama-tied", ["_proj", "_proj"])] {
            for (world, rank) in [(1, 1), (2, 5), (4, 16)] {
                let setup = Setup::open(&fixture(model), DTYPES[1], world);
                let adapter = setup.adapter(1, &layers, rank, 0.1, false);
                let build = setup.build(world - 1);
                let decoder = Decoder::new(&setup.config, &build, 8).unwrap();
                let mut resident = ResidentAdapters::new(build.clone());
                let matrices = |resident: &ResidentAdapters| {
                    let modules = resident.generations.values().flat_map(HashMap::values);
                    let pages = |matrix: &Matrix| matrix.bytes().next_multiple_of(PAGE);
                    modules
                        .map(|module| &module.factors)
                        .map(|factors| pages(&factors.a) + factors.up.iter().map(|p| pages(&p.b)).sum::<usize>())
                        .sum::<usize>()
                };
                for count in 1..=2 {
                    resident.add(&decoder, count, &adapter).unwrap();
                    let buffers = 3 * 4 * resident.buffers.as_ref().unwrap().values;
                    let reserved = resident_adapter_bytes(&decoder, &build, rank, count as usize).unwrap();
                    assert_eq!(reserved, (matrices(&resident) + buffers) as u64, "{count} of rank {rank}");
                }
                (1..=2).for_each(|generation| resident.remove(generation));
                assert_eq!((matrices(&resident), resident.buffers.is_none()), (0, true));
            }
        }
    }
}
