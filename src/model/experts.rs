//! The mixture of experts of one layer.

use rollout_kernels::{DeviceBuffer, Matrix, Router, Routing, Scoring};

use super::adapters::TargetModule;
use super::config::{ExpertsConfig, ModelConfig, SharedExpertConfig};
use super::context::ForwardContext;
use super::layers::{Build, Linear, Projection};
use super::mlp::Mlp;
use super::parameterized::{MatrixVisitor, ParamSlot, Parameterized, Visitor};
use crate::error::Result;
use crate::weights::{ParamSpec, ShardRule};

/// A router, the experts of this rank that it chooses among, and the expert that all tokens take, if there is one.
pub(super) struct Experts {
    router: Linear,
    /// `None` for a router that scores by a softmax.
    correction_bias: Option<CorrectionBias>,
    /// The factor of the weights.
    scale: f32,
    /// Whether the weights of a token's experts are divided by their sum.
    normalised: bool,
    gate_up: ExpertMatrix,
    down: ExpertMatrix,
    shared: Option<SharedExpert>,
    /// Rows whose experts are computed at once.
    rows_at_once: usize,
}

/// The term that is added to the scores of a layer's experts to choose among them, and not to weigh them.
struct CorrectionBias {
    values: DeviceBuffer,
    spec: ParamSpec,
}

/// The same projections of all experts of a rank, one expert below the other.
struct ExpertMatrix {
    weight: Matrix,
    /// Each projection's weight, and the first row of `weight` that it has. The experts of other ranks have no rows.
    parts: Vec<(ParamSpec, usize)>,
}

/// An expert that all tokens take.
struct SharedExpert {
    mlp: Mlp,
    /// Gives the factor of its output, before the sigmoid; `None` if there is no factor.
    gate: Option<Linear>,
}

impl Experts {
    /// The experts of layer `layer`. Their matrices have no memory yet.
    pub fn new(config: &ModelConfig, experts: &ExpertsConfig, build: &Build, layer: usize) -> Result<Self> {
        let (hidden, width) = (config.hidden_size, experts.intermediate_size);
        let block = format!("model.layers.{layer}.mlp");
        let linear = |part: &str, rows: usize| {
            let name = format!("{block}.{part}");
            let projection = Projection { name, rows, rule: ShardRule::Replicated, bias: false };
            Linear::by_rows(build, vec![projection], &[hidden])
        };
        let matrix = |projections: &[&str], rows: usize, columns: usize| {
            ExpertMatrix::new(build, &format!("{block}.experts"), experts.count, projections, [rows, columns])
        };
        let shared = |shared: &SharedExpertConfig| -> Result<SharedExpert> {
            // The names of Qwen2-MoE's, which is gated, and of GLM's, which is not.
            let name = if shared.is_gated { "shared_expert" } else { "shared_experts" };
            let mlp = Mlp::new(build, &format!("{block}.{name}"), hidden, shared.intermediate_size, false)?;
            let gate = shared.is_gated.then(|| linear("shared_expert_gate", 1)).transpose()?;
            Ok(SharedExpert { mlp, gate })
        };
        let correction_bias = || -> Result<CorrectionBias> {
            let spec = ParamSpec::buffer(format!("{block}.gate.e_score_correction_bias"), experts.count);
            Ok(CorrectionBias { values: build.device.buffer(experts.count)?, spec })
        };
        Ok(Self {
            router: linear("gate", experts.count)?,
            correction_bias: experts.has_correction_bias.then(correction_bias).transpose()?,
            scale: experts.scale,
            normalised: experts.normalised,
            gate_up: matrix(&["gate_proj", "up_proj"], width, hidden)?,
            down: matrix(&["down_proj"], hidden, width)?,
            shared: experts.shared.as_ref().map(shared).transpose()?,
            rows_at_once: build.device.expert_rows(),
        })
    }

    /// Reads the workspace's `normed` and leaves the block's term of the residual stream in `delta`. `routing` has the
    /// experts of the rows afterwards. It is the `index`-th layer with experts.
    pub fn forward(&self, context: &ForwardContext<'_>, index: usize, routing: &mut Routing) -> Result<()> {
        let ForwardContext { ops, comm, workspace, .. } = *context;
        let (w, experts) = (&workspace.step, workspace.experts());
        let rows = w.normed.dim(0)?;
        let scoring = match &self.correction_bias {
            Some(CorrectionBias { values, .. }) => Scoring::Sigmoid { bias: values },
            None => Scoring::Softmax,
        };
        let (gate, normalise, scale) = (self.router.weight(), self.normalised, self.scale);
        let router = Router { gate, scoring, normalise, scale, layer: index };
        let forced = context.forced.get(index).map(Vec::as_slice);
        ops.route(&w.normed, &router, forced, &experts.logits, routing)?;
        for first in (0..rows).step_by(self.rows_at_once) {
            ops.group_by_expert(routing, first..rows.min(first + self.rows_at_once))?;
            let (gate_up, down) = (&self.gate_up.weight, &self.down.weight);
            ops.expert_linear_silu_mul(&w.normed, gate_up, routing, &experts.gate_up, &experts.activation)?;
            ops.expert_linear(&experts.activation, down, routing, &experts.output)?;
            ops.combine(&experts.output, routing, &w.delta)?;
        }
        comm.all_reduce_sum(&w.delta)?;
        self.shared.as_ref().map_or(Ok(()), |shared| shared.add(context))
    }
}

impl SharedExpert {
    /// Adds its output for the workspace's `normed` to `delta`.
    fn add(&self, context: &ForwardContext<'_>) -> Result<()> {
        let (ops, w, experts) = (context.ops, &context.workspace.step, context.workspace.experts());
        self.mlp.forward(context, &experts.shared)?;
        let Some(gate) = &self.gate else { return Ok(ops.add(&experts.shared, &w.delta)?) };
        gate.forward(ops, &w.normed, &experts.shared_gate)?;
        Ok(ops.add_gated(&experts.shared_gate, &experts.shared, &w.delta)?)
    }
}

impl Parameterized for Experts {
    fn parts(&self) -> Vec<&dyn Parameterized> {
        let mut parts: Vec<&dyn Parameterized> = vec![&self.router];
        parts.extend(self.correction_bias.iter().map(|bias| bias as &dyn Parameterized));
        parts.extend([&self.gate_up as &dyn Parameterized, &self.down]);
        if let Some(SharedExpert { mlp, gate }) = &self.shared {
            parts.push(mlp);
            parts.extend(gate.iter().map(|gate| gate as &dyn Parameterized));
        }
        parts
    }

    fn parts_mut(&mut self) -> Vec<&mut dyn Parameterized> {
        let mut parts: Vec<&mut dyn Parameterized> = vec![&mut self.router];
        parts.extend(self.correction_bias.iter_mut().map(|bias| bias as &mut dyn Parameterized));
        parts.extend([&mut self.gate_up as &mut dyn Parameterized, &mut self.down]);
        if let Some(SharedExpert { mlp, gate }) = &mut self.shared {
            parts.push(mlp);
            parts.extend(gate.iter_mut().map(|gate| gate as &mut dyn Parameterized));
        }
        parts
    }

    /// Only the shared expert's: adapters of the router and of experts are merged.
    fn target_modules(&self) -> Vec<TargetModule<'_>> {
        self.shared.as_ref().map_or_else(Vec::new, |shared| shared.mlp.target_modules())
    }
}

impl Parameterized for CorrectionBias {
    fn visit(&mut self, visitor: &mut Visitor<'_>) -> Result<()> {
        visitor(&self.spec, ParamSlot::Vector { vector: &self.values, offset: 0 })
    }

    fn visit_matrices(&mut self, _: &mut MatrixVisitor<'_>) -> Result<()> {
        Ok(())
    }

    fn target_modules(&self) -> Vec<TargetModule<'_>> {
        Vec::new()
    }

    fn bytes(&self) -> u64 {
        self.values.bytes() as u64
    }
}

impl ExpertMatrix {
    /// The weights `[rows, columns]` of `projections` of each of `count` experts, whose names begin with `experts`.
    fn new(
        build: &Build,
        experts: &str,
        count: usize,
        projections: &[&str],
        [rows, columns]: [usize; 2],
    ) -> Result<Self> {
        let (mut parts, mut first_row) = (Vec::new(), 0);
        for index in 0..count {
            for projection in projections {
                let rule = ShardRule::OneRank { index, of: count };
                let spec = ParamSpec::new(format!("{experts}.{index}.{projection}.weight"), [rows, columns], rule);
                let held = build.partition.slice(&spec)?.rows.len();
                parts.push((spec, first_row));
                first_row += held;
            }
        }
        // One leaf, because a rank has the whole of each sum.
        Ok(Self { weight: build.matrix(first_row, columns, 1), parts })
    }
}

impl Parameterized for ExpertMatrix {
    fn visit(&mut self, visitor: &mut Visitor<'_>) -> Result<()> {
        for (spec, first_row) in &self.parts {
            visitor(spec, ParamSlot::Matrix { matrix: &mut self.weight, first_row: *first_row })?;
        }
        Ok(())
    }

    fn visit_matrices(&mut self, visitor: &mut MatrixVisitor<'_>) -> Result<()> {
        let specs: Vec<&ParamSpec> = self.parts.iter().map(|(spec, _)| spec).collect();
        visitor(&specs, &mut self.weight)
    }

    fn target_modules(&self) -> Vec<TargetModule<'_>> {
        Vec::new()
    }

    fn bytes(&self) -> u64 {
        self.weight.bytes() as u64
    }
}
