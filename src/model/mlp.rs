//! A dense feed-forward block (MLP).

use candle_core::Tensor;
use rollout_kernels::DeviceBuffer;

use super::context::ForwardContext;
use super::layers::{Build, Linear, Projection};
use super::parameterized::Parameterized;
use super::workspace::with_width;
use crate::error::Result;
use crate::weights::ShardRule;

/// The gated MLP `down(silu(gate(x)) * up(x))`, with gate and up projections fused.
pub(super) struct Mlp {
    /// Columns of the activation on this rank.
    width: usize,
    gate_up: Linear,
    down: Linear,
}

impl Mlp {
    /// The MLP of this width whose parameters' names begin with `name`. Its matrices have no memory yet.
    pub fn new(build: &Build, name: &str, hidden: usize, intermediate: usize, bias: bool) -> Result<Self> {
        let projection =
            |part: &str, rows: usize, rule: ShardRule| Projection { name: format!("{name}.{part}"), rows, rule, bias };
        let by_rows = |part: &str| projection(part, intermediate, ShardRule::Rows);
        let gate_up = vec![by_rows("gate_proj"), by_rows("up_proj")];
        let down = projection("down_proj", hidden, ShardRule::Columns);
        Ok(Self {
            width: build.partition.share(intermediate),
            gate_up: Linear::by_rows(build, gate_up, &[hidden])?,
            down: Linear::by_columns(build, down, intermediate)?,
        })
    }

    /// Reads the workspace's `normed` and leaves the block's output in `out`, without [`Mlp::bias`].
    pub fn forward(&self, context: &ForwardContext<'_>, out: &Tensor) -> Result<()> {
        let (ops, w) = (context.ops, &context.workspace.step);
        let (gate_up, activation) = (with_width(&w.gate_up, 2 * self.width)?, with_width(&w.activation, self.width)?);
        match context.adapters {
            None => self.gate_up.forward_silu_mul(ops, &w.normed, &gate_up, &activation)?,
            Some(_) => {
                self.gate_up.forward(ops, &w.normed, &gate_up)?;
                context.add_adapters(self.gate_up.name(), &w.normed, &gate_up)?;
                ops.silu_mul(&gate_up, &activation)?;
            }
        }
        self.down.forward_partial(ops, &activation, out)?;
        context.comm.all_reduce_sum(out)?;
        context.add_adapters(self.down.name(), &activation, out)
    }

    /// The bias of the down projection.
    pub fn bias(&self) -> Option<&DeviceBuffer> {
        self.down.bias()
    }
}

impl Parameterized for Mlp {
    fn parts(&self) -> Vec<&dyn Parameterized> {
        vec![&self.gate_up, &self.down]
    }

    fn parts_mut(&mut self) -> Vec<&mut dyn Parameterized> {
        vec![&mut self.gate_up, &mut self.down]
    }
}
