//! The feed-forward block (MLP) of one layer.

use rollout_kernels::DeviceBuffer;

use super::config::ModelConfig;
use super::context::ForwardContext;
use super::layers::{Build, Linear, Projection};
use super::parameterized::Parameterized;
use crate::error::Result;
use crate::weights::ShardRule;

/// The gated MLP `down(silu(gate(x)) * up(x))`, with gate and up projections fused.
pub(super) struct Mlp {
    gate_up: Linear,
    down: Linear,
}

impl Mlp {
    /// The MLP of layer `layer`. Its matrices have no memory yet.
    pub fn new(config: &ModelConfig, build: &Build, layer: usize) -> Result<Self> {
        let (hidden, intermediate, bias) = (config.hidden_size, config.intermediate_size, config.mlp_bias);
        let projection = |part: &str, rows: usize, rule: ShardRule| Projection {
            name: format!("model.layers.{layer}.mlp.{part}"),
            rows,
            rule,
            bias,
        };
        let by_rows = |part: &str| projection(part, intermediate, ShardRule::Rows);
        let gate_up = vec![by_rows("gate_proj"), by_rows("up_proj")];
        let down = projection("down_proj", hidden, ShardRule::Columns);
        Ok(Self {
            gate_up: Linear::by_rows(build, gate_up, &[hidden])?,
            down: Linear::by_columns(build, down, intermediate)?,
        })
    }

    /// Reads the workspace's `normed` and leaves the block's term of the residual stream in `delta`, without
    /// [`Mlp::bias`].
    pub fn forward(&self, context: &ForwardContext<'_>) -> Result<()> {
        let (ops, w) = (context.ops, &context.workspace.step);
        match context.adapters {
            None => self.gate_up.forward_silu_mul(ops, &w.normed, &w.gate_up, &w.activation)?,
            Some(_) => {
                self.gate_up.forward(ops, &w.normed, &w.gate_up)?;
                context.add_adapters(self.gate_up.name(), &w.normed, &w.gate_up)?;
                ops.silu_mul(&w.gate_up, &w.activation)?;
            }
        }
        self.down.forward_partial(ops, &w.activation, &w.delta)?;
        context.comm.all_reduce_sum(&w.delta)?;
        context.add_adapters(self.down.name(), &w.activation, &w.delta)
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
