//! The division of parameters among tensor-parallel ranks.
//!
//! Each parameter carries its rule ([`ParamSpec`]). Loading a checkpoint and every kind of push go through
//! [`ShardRule::slice`], so that no two of them can divide a parameter in different ways.

use std::ops::Range;

use rollout_kernels::StorageDtype;

use crate::error::{Error, Result};

/// How a parameter is divided among tensor-parallel ranks.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum ShardRule {
    /// Every rank holds the whole.
    Replicated,
    /// Dimension 0 is split evenly: gate and up projections and their biases.
    Rows,
    /// Dimension 0 is split into parts of [`padded_share`] rows, of which the last may be shorter: embedding, head, and
    /// the layers of a vision tower. Its rank stores it and computes with it as if it were not.
    PaddedRows,
    /// Dimension 0 is split by whole attention heads of `head_dim` rows. With fewer heads than ranks, as keys and
    /// values may have, rank `r` of `w` holds the one head `r * heads / w`, so that each head is on `w / heads`
    /// neighbouring ranks.
    Heads { heads: usize, head_dim: usize },
    /// Dimension 1 is split evenly: output and down projections.
    Columns,
    /// One rank has the whole, and all others nothing: the experts of a layer. Expert `index` of `of` is on rank
    /// `index * world / of`, so that each rank has neighbouring experts.
    OneRank { index: usize, of: usize },
}

/// A rectangle of a parameter, which is seen as a matrix of dimension 0 by all other dimensions. A vector has one
/// column.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Slice {
    pub rows: Range<usize>,
    pub cols: Range<usize>,
}

/// A parameter of the model: its Hugging Face name, its whole shape, and how it is divided among ranks.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ParamSpec {
    /// The name, for example `model.layers.0.self_attn.q_proj.weight`.
    pub name: String,
    /// The shape of the whole parameter; a linear weight is `[out_features, in_features]`.
    pub shape: Vec<usize>,
    pub shard: ShardRule,
    /// Whether it is a float32 buffer in transformers: it serves without rounding, and as trainers push parameters
    /// only, a FULL push may lack it.
    pub is_buffer: bool,
}

/// The rows and columns of a parameter of this shape: dimension 0, and the product of all other dimensions. A table of
/// positions `[1, positions, width]` has rows, because leading dimensions of size 1 are left out if two others follow.
pub fn matrix_shape(shape: &[usize]) -> (usize, usize) {
    match shape {
        [] => (1, 1),
        [1, rest @ ..] if rest.len() >= 2 => matrix_shape(rest),
        [rows, rest @ ..] => (*rows, rest.iter().product()),
    }
}

impl Slice {
    /// All of a parameter of this shape.
    pub fn whole(shape: &[usize]) -> Self {
        let (rows, cols) = matrix_shape(shape);
        Self { rows: 0..rows, cols: 0..cols }
    }

    /// How many elements the slice has.
    pub fn len(&self) -> usize {
        self.rows.len() * self.cols.len()
    }

    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }
}

impl ShardRule {
    /// The part of a parameter of `shape` that rank `rank` of `world` holds.
    ///
    /// # Errors
    /// `Config` if the shape cannot be divided in `world` parts by this rule.
    ///
    /// # Panics
    /// If `rank >= world`.
    pub fn slice(self, shape: &[usize], rank: usize, world: usize) -> Result<Slice> {
        assert!(rank < world, "rank {rank} of {world}");
        let whole = Slice::whole(shape);
        match self {
            Self::Replicated => Ok(whole),
            Self::Rows => Ok(Slice { rows: even_part(whole.rows.end, rank, world, "rows", shape)?, ..whole }),
            Self::PaddedRows => Ok(Slice { rows: padded_part(whole.rows.end, rank, world, shape)?, ..whole }),
            Self::Columns if shape.len() == 2 => {
                Ok(Slice { cols: even_part(whole.cols.end, rank, world, "columns", shape)?, ..whole })
            }
            Self::Columns => {
                Err(Error::Config(format!("shape {shape:?} has no columns to split; it must be a matrix")))
            }
            Self::Heads { heads, head_dim } => {
                if heads * head_dim != whole.rows.end {
                    return Err(Error::Config(format!(
                        "shape {shape:?} is not {heads} heads of {head_dim} rows; the checkpoint and config.json \
                         disagree"
                    )));
                }
                let heads = head_range(heads, rank, world)?;
                Ok(Slice { rows: heads.start * head_dim..heads.end * head_dim, ..whole })
            }
            Self::OneRank { index, of } if index * world / of == rank => Ok(whole),
            Self::OneRank { .. } => Ok(Slice { rows: 0..0, ..whole }),
        }
    }
}

impl ParamSpec {
    pub fn new(name: impl Into<String>, shape: impl Into<Vec<usize>>, shard: ShardRule) -> Self {
        Self { name: name.into(), shape: shape.into(), shard, is_buffer: false }
    }

    /// A float32 buffer with this number of values, whole on every rank.
    pub fn buffer(name: impl Into<String>, len: usize) -> Self {
        Self { is_buffer: true, ..Self::new(name, [len], ShardRule::Replicated) }
    }

    /// The dtype in which it serves, in a model that serves in `model`.
    pub fn dtype<D: From<StorageDtype>>(&self, model: D) -> D {
        if self.is_buffer { StorageDtype::F32.into() } else { model }
    }

    /// The part of this parameter that rank `rank` of `world` holds.
    ///
    /// # Errors
    /// As for [`ShardRule::slice`], with the parameter's name.
    pub fn slice(&self, rank: usize, world: usize) -> Result<Slice> {
        self.shard.slice(&self.shape, rank, world).map_err(|e| Error::Config(format!("{}: {e}", self.name)))
    }
}

/// The attention heads of rank `rank` of `world`: an even part of `heads`, or one that neighbouring ranks share if
/// there are fewer heads than ranks.
///
/// # Errors
/// `Config` unless `heads` is a multiple of `world` or `world` of `heads`.
pub fn head_range(heads: usize, rank: usize, world: usize) -> Result<Range<usize>> {
    if heads != 0 && world.is_multiple_of(heads) {
        let head = rank * heads / world;
        return Ok(head..head + 1);
    }
    if !heads.is_multiple_of(world) {
        return Err(Error::Config(format!("{heads} heads cannot be divided among {world} ranks")));
    }
    let part = heads / world;
    Ok(rank * part..(rank + 1) * part)
}

/// How many of `len` items each of `world` ranks has room for, if the last rank may have fewer.
pub fn padded_share(len: usize, world: usize) -> usize {
    len.div_ceil(world)
}

/// The rows of rank `rank` among shares of equal length, of which the last may be cut.
fn padded_part(len: usize, rank: usize, world: usize, shape: &[usize]) -> Result<Range<usize>> {
    let part = padded_share(len, world);
    if part * (world - 1) >= len {
        return Err(Error::Config(format!(
            "the {len} rows of shape {shape:?}, {part} for each of {world} ranks, leave none for the last"
        )));
    }
    Ok(rank * part..len.min((rank + 1) * part))
}

/// The indices of rank `rank` if `len` of them are divided evenly. `what` they are called in errors.
fn even_part(len: usize, rank: usize, world: usize, what: &str, shape: &[usize]) -> Result<Range<usize>> {
    if !len.is_multiple_of(world) {
        return Err(Error::Config(format!(
            "the {len} {what} of shape {shape:?} cannot be divided evenly among {world} ranks"
        )));
    }
    let part = len / world;
    Ok(rank * part..(rank + 1) * part)
}
