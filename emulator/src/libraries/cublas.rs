//! cuBLAS: products of matrices. The real library chooses its kernel, and so the order of its sums, by the shape. Here
//! the number of pieces that a sum has depends on the shape, so that who relies on cuBLAS for the same bits at every
//! batch size sees that.

use std::ffi::c_void;
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};

use super::number::ElementType;
use crate::entry_points::{entry_points, missing};
use crate::error::{ErrorCode, OUT_OF_MEMORY, Result};
use crate::handles::{Handle, Handles};
use crate::memory;
use crate::settings;
use crate::stream::{Operation, OperationKind, current_device, stream, wait_for_device};

const ALLOC_FAILED: i32 = 3;
const INVALID_VALUE: i32 = 7;
const EXECUTION_FAILED: i32 = 13;
const NOT_SUPPORTED: i32 = 15;

/// Sums that run beside each other, as in a vector register.
const LANES: usize = 8;

/// The library's status for a code, which may be one already.
fn status_of(code: ErrorCode) -> i32 {
    match code {
        OUT_OF_MEMORY => ALLOC_FAILED,
        1 | ALLOC_FAILED | INVALID_VALUE | 8 | 11 | EXECUTION_FAILED..=16 => code,
        _ => EXECUTION_FAILED,
    }
}

/// A handle: the stream that it works in, and the device on which it was made.
struct Blas {
    stream: AtomicUsize,
    device: usize,
}

static HANDLES: Handles<Blas> = Handles::new();

/// An element type by its `cudaDataType`.
fn type_of(code: i32) -> Result<ElementType> {
    match code {
        0 => Ok(ElementType::F32),
        1 => Ok(ElementType::F64),
        2 => Ok(ElementType::F16),
        14 => Ok(ElementType::Bf16),
        _ => Err(NOT_SUPPORTED),
    }
}

/// Matrices in the device's memory, column after column, one for each product of a batch.
#[derive(Clone, Copy)]
struct Matrices {
    at: u64,
    ty: ElementType,
    /// Elements from one column to the next.
    leading: usize,
    /// Elements from one matrix to the next.
    stride: i64,
    transposed: bool,
}

impl Matrices {
    /// # Errors
    /// For a type that is not emulated.
    fn new(at: u64, ty: i32, leading: i32, stride: i64, operation: i32) -> Result<Self> {
        Ok(Self { at, ty: type_of(ty)?, leading: leading as usize, stride, transposed: operation != 0 })
    }

    /// Place of an element of what the product sees.
    fn index(&self, row: usize, column: usize) -> usize {
        if self.transposed { row * self.leading + column } else { column * self.leading + row }
    }

    /// The bytes of one matrix.
    fn bytes(&self, number: usize, rows: usize, columns: usize) -> Result<*mut [u8]> {
        let at = self.at.wrapping_add_signed(self.stride * number as i64 * self.ty.bytes() as i64);
        let last = if rows == 0 || columns == 0 { 0 } else { self.index(rows - 1, columns - 1) + 1 };
        let bytes = last * self.ty.bytes();
        let start = memory::get().bytes_at_run(at, bytes)?;
        Ok(std::ptr::slice_from_raw_parts_mut(start, bytes))
    }

    fn get(&self, bytes: &[u8], row: usize, column: usize) -> f64 {
        self.ty.get(&bytes[self.index(row, column) * self.ty.bytes()..])
    }
}

/// `c = alpha a b + beta c` for each of a batch, `a` of `m` rows and `k` columns, `b` of `k` rows and `n` columns.
#[derive(Clone, Copy)]
struct Product {
    m: usize,
    n: usize,
    k: usize,
    alpha: f64,
    beta: f64,
    a: Matrices,
    b: Matrices,
    c: Matrices,
    batch: usize,
}

impl Product {
    /// In how many pieces each sum is cut.
    fn pieces(&self) -> usize {
        let narrow = self.n.min(self.m);
        if settings::get().blas_fixed || narrow > 64 { 1 } else { 1 + narrow % 4 }
    }

    /// The sum of products of a row and a column.
    fn dot(&self, x: &[f64], y: &[f64]) -> f64 {
        if self.a.ty == ElementType::F64 {
            return x.iter().zip(y).map(|(x, y)| x * y).sum();
        }
        let pieces = self.pieces();
        let piece = |i: usize| {
            let range = self.k * i / pieces..self.k * (i + 1) / pieces;
            let mut lanes = [0f32; LANES];
            for (x, y) in x[range.clone()].chunks(LANES).zip(y[range].chunks(LANES)) {
                for (lane, (x, y)) in lanes.iter_mut().zip(x.iter().zip(y)) {
                    *lane += *x as f32 * *y as f32;
                }
            }
            lanes.iter().sum::<f32>()
        };
        f64::from((0..pieces).map(piece).sum::<f32>())
    }

    fn run(&self) -> Result {
        let (m, n, k) = (self.m, self.n, self.k);
        for i in 0..self.batch {
            let (a, b, c) = (self.a.bytes(i, m, k)?, self.b.bytes(i, k, n)?, self.c.bytes(i, m, n)?);
            // SAFETY: the device's memory is checked, and the result is no part of what is multiplied.
            let (a, b, c) = unsafe { (&*a, &*b, &mut *c) };
            let row = |r: usize| (0..k).map(|j| self.a.get(a, r, j)).collect::<Vec<_>>();
            let column = |j: usize| (0..k).map(|r| self.b.get(b, r, j)).collect::<Vec<_>>();
            let (rows, columns) = ((0..m).map(row).collect::<Vec<_>>(), (0..n).map(column).collect::<Vec<_>>());
            for (j, y) in columns.iter().enumerate() {
                for (r, x) in rows.iter().enumerate() {
                    let old = if self.beta == 0.0 { 0.0 } else { self.beta * self.c.get(c, r, j) };
                    let place = self.c.index(r, j) * self.c.ty.bytes();
                    self.c.ty.set(&mut c[place..], self.alpha * self.dot(x, y) + old);
                }
            }
        }
        Ok(())
    }

    fn push(self, handle: Handle) -> Result {
        let on = HANDLES.get(handle)?.stream.load(Ordering::Relaxed);
        stream(on)?.push(Operation::new(OperationKind::Kernel, move || self.run()))
    }
}

/// A factor, whose type follows from the `cublasComputeType_t`.
///
/// # Safety
/// `at` points to one.
unsafe fn factor(at: *const c_void, compute: i32) -> f64 {
    let (ty, bytes) = match compute {
        64 | 65 => (ElementType::F16, 2),
        70 | 71 => (ElementType::F64, 8),
        _ => (ElementType::F32, 4),
    };
    // SAFETY: the caller answers for the pointer.
    ty.get(unsafe { std::slice::from_raw_parts(at.cast::<u8>(), bytes) })
}

/// Sizes that must not be negative.
fn sizes<const N: usize>(sizes: [i32; N]) -> Result<[usize; N]> {
    if sizes.iter().any(|&size| size < 0) { Err(INVALID_VALUE) } else { Ok(sizes.map(|size| size as usize)) }
}

entry_points! {
    status status_of;
    fn cublasCreate_v2(out: *mut Handle) {
        *out = HANDLES.add(Arc::new(Blas { stream: AtomicUsize::new(0), device: current_device()? }));
        Ok(())
    }
    fn cublasDestroy_v2(handle: Handle) {
        // As its documentation says: also streams that are being captured.
        wait_for_device(HANDLES.get(handle)?.device)?;
        HANDLES.remove(handle).map(drop)
    }
    fn cublasSetStream_v2(handle: Handle, on: Handle) {
        HANDLES.get(handle)?.stream.store(on, Ordering::Relaxed);
        Ok(())
    }
    fn cublasSetWorkspace_v2(handle: Handle, _at: u64, _bytes: usize) { HANDLES.get(handle).map(drop) }
    fn cublasSetMathMode(handle: Handle, _mode: i32) { HANDLES.get(handle).map(drop) }
    fn cublasGemmStridedBatchedEx(
        handle: Handle, ta: i32, tb: i32, m: i32, n: i32, k: i32, alpha: *const c_void,
        a: u64, at: i32, lda: i32, sa: i64, b: u64, bt: i32, ldb: i32, sb: i64, beta: *const c_void,
        c: u64, ct: i32, ldc: i32, sc: i64, batch: i32, compute: i32, _algorithm: i32
    ) {
        let [m, n, k, batch] = sizes([m, n, k, batch])?;
        let (alpha, beta) = (factor(alpha, compute), factor(beta, compute));
        let (a, b) = (Matrices::new(a, at, lda, sa, ta)?, Matrices::new(b, bt, ldb, sb, tb)?);
        Product { m, n, k, alpha, beta, a, b, c: Matrices::new(c, ct, ldc, sc, 0)?, batch }.push(handle)
    }
    fn cublasGemmEx(
        handle: Handle, ta: i32, tb: i32, m: i32, n: i32, k: i32, alpha: *const c_void,
        a: u64, at: i32, lda: i32, b: u64, bt: i32, ldb: i32, beta: *const c_void,
        c: u64, ct: i32, ldc: i32, compute: i32, _algorithm: i32
    ) {
        let [m, n, k] = sizes([m, n, k])?;
        let (alpha, beta) = (factor(alpha, compute), factor(beta, compute));
        let (a, b) = (Matrices::new(a, at, lda, 0, ta)?, Matrices::new(b, bt, ldb, 0, tb)?);
        Product { m, n, k, alpha, beta, a, b, c: Matrices::new(c, ct, ldc, 0, 0)?, batch: 1 }.push(handle)
    }
    fn cublasSgemm_v2(
        handle: Handle, ta: i32, tb: i32, m: i32, n: i32, k: i32, alpha: *const f32,
        a: u64, lda: i32, b: u64, ldb: i32, beta: *const f32, c: u64, ldc: i32
    ) {
        let [m, n, k] = sizes([m, n, k])?;
        let (alpha, beta) = (f64::from(*alpha), f64::from(*beta));
        let (a, b) = (Matrices::new(a, 0, lda, 0, ta)?, Matrices::new(b, 0, ldb, 0, tb)?);
        Product { m, n, k, alpha, beta, a, b, c: Matrices::new(c, 0, ldc, 0, 0)?, batch: 1 }.push(handle)
    }
    fn cublasSgemmStridedBatched(
        handle: Handle, ta: i32, tb: i32, m: i32, n: i32, k: i32, alpha: *const f32,
        a: u64, lda: i32, sa: i64, b: u64, ldb: i32, sb: i64, beta: *const f32, c: u64, ldc: i32, sc: i64, batch: i32
    ) {
        let [m, n, k, batch] = sizes([m, n, k, batch])?;
        let (alpha, beta) = (f64::from(*alpha), f64::from(*beta));
        let (a, b) = (Matrices::new(a, 0, lda, sa, ta)?, Matrices::new(b, 0, ldb, sb, tb)?);
        Product { m, n, k, alpha, beta, a, b, c: Matrices::new(c, 0, ldc, sc, 0)?, batch }.push(handle)
    }
    fn cublasDgemmStridedBatched(
        handle: Handle, ta: i32, tb: i32, m: i32, n: i32, k: i32, alpha: *const f64,
        a: u64, lda: i32, sa: i64, b: u64, ldb: i32, sb: i64, beta: *const f64, c: u64, ldc: i32, sc: i64, batch: i32
    ) {
        let [m, n, k, batch] = sizes([m, n, k, batch])?;
        let (alpha, beta) = (*alpha, *beta);
        let (a, b) = (Matrices::new(a, 1, lda, sa, ta)?, Matrices::new(b, 1, ldb, sb, tb)?);
        Product { m, n, k, alpha, beta, a, b, c: Matrices::new(c, 1, ldc, sc, 0)?, batch }.push(handle)
    }
}

missing! {
    status NOT_SUPPORTED;
    cublasDasum_v2 cublasDgemm_v2 cublasDgemv_v2 cublasSasum_v2 cublasSgemv_v2
    cublasLtCreate cublasLtDestroy cublasLtLoggerOpenFile cublasLtLoggerSetLevel cublasLtMatmul
    cublasLtMatmulAlgoGetHeuristic cublasLtMatmulDescCreate cublasLtMatmulDescDestroy cublasLtMatmulDescSetAttribute
    cublasLtMatmulPreferenceCreate cublasLtMatmulPreferenceDestroy cublasLtMatmulPreferenceSetAttribute
    cublasLtMatrixLayoutCreate cublasLtMatrixLayoutDestroy cublasLtMatrixLayoutSetAttribute
}
