//! Several adapters of one layer in one job: each thread takes one adapter after the other, with its rows. The kernels
//! and so the bits are those of [`linear()`](super::linear()) for each adapter alone, which would wake all threads for
//! each of its thin products.

use std::cell::RefCell;
use std::sync::atomic::{AtomicUsize, Ordering};

use super::linear::linear;
use super::packed::PackedMatrix;
use super::pool::Cpu;
use super::rows::{Rows, RowsMut, SharedRows};
use crate::adapter::{AdapterRows, UpFactor};

/// Rows that go through an adapter at once: enough that its factors are read from the cache.
const ROWS_AT_ONCE: usize = 128;

/// A processor of one thread for each thread of the pool.
pub(crate) struct AdapterThreads {
    threads: RefCell<Vec<Cpu>>,
}

impl AdapterThreads {
    pub fn new() -> Self {
        Self { threads: RefCell::default() }
    }

    /// `out[rows] += b (a x[rows])` of each group; no two groups have a row in common. `scratch` has buffers for the
    /// selected rows, for `a x` and for `b (a x)`. Returns false, and does nothing, if these are too short for a row on
    /// each thread.
    pub fn add(
        &self,
        cpu: &Cpu,
        x: Rows<'_>,
        groups: &[AdapterRows<'_>],
        scratch: [&mut [f32]; 3],
        out: RowsMut<'_>,
    ) -> bool {
        let threads = cpu.pool().threads().min(groups.len());
        let widest = |group: &AdapterRows<'_>| x.width().max(out.width()).max(group.factors.a.n());
        let widest = groups.iter().map(widest).max().unwrap_or(1).max(1);
        let shortest = scratch.iter().map(|buffer| buffer.len()).min().unwrap_or(0);
        let most_rows = (shortest / threads.max(1) / widest).min(ROWS_AT_ONCE);
        if most_rows == 0 {
            return false;
        }
        let mut own = self.threads.borrow_mut();
        own.resize_with(threads, || Cpu::with_isa(1, cpu.isa()));
        let part = most_rows * widest;
        let [selected, ranks, products] = scratch.map(|buffer| buffer.chunks_mut(part));
        let mut work: Vec<_> = own.iter_mut().zip(selected.zip(ranks).zip(products)).collect();
        let (next, out) = (AtomicUsize::new(0), out.share());
        cpu.pool().run_chunks(&mut work, 1, |_, work| {
            let (cpu, ((selected, ranks), products)) = &mut work[0];
            while let Some(group) = groups.get(next.fetch_add(1, Ordering::Relaxed)) {
                for rows in group.rows.chunks(most_rows) {
                    add_rows(cpu, x, AdapterRows { rows, ..*group }, [selected, ranks, products], &out);
                }
            }
        });
        true
    }

    /// Gives the memory that the threads reuse back.
    pub fn release(&self) {
        self.threads.take();
    }
}

/// One adapter for some of its rows, on one thread.
fn add_rows(
    cpu: &Cpu,
    x: Rows<'_>,
    group: AdapterRows<'_>,
    [selected, ranks, products]: [&mut [f32]; 3],
    out: &SharedRows<'_>,
) {
    let (count, width) = (group.rows.len(), x.width());
    for (to, row) in selected.chunks_exact_mut(width).zip(group.rows) {
        to.copy_from_slice(x.row(*row as usize));
    }
    let a: &PackedMatrix = group.factors.a.storage();
    let total = a.n();
    linear(cpu, Rows::new(selected, count, width, width), a, None, RowsMut::new(ranks, count, total, total));
    for UpFactor { b, first_rank, first_column } in &group.factors.up {
        let (b, n): (&PackedMatrix, usize) = (b.storage(), b.n());
        let own = Rows::new(&ranks[*first_rank..], count, b.k(), total);
        linear(cpu, own, b, None, RowsMut::new(products, count, n, n));
        for (product, row) in products.chunks_exact(n).zip(group.rows) {
            // SAFETY: no other group has this row, and one thread takes all of a group.
            let out = unsafe { out.part(*row as usize, *first_column, n) };
            out.iter_mut().zip(product).for_each(|(out, product)| *out += product);
        }
    }
}
