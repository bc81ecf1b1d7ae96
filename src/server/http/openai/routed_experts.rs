//! `routed_experts`: the experts that the tokens of a prompt and its sample took, as vLLM answers them.

use std::collections::HashMap;

use base64::Engine as _;
use base64::engine::general_purpose::STANDARD;

use crate::engine::Completion;
use crate::server::http::npy::npy_header;
use crate::server::{ModelFacts, RoutingRules};

/// Writes the experts of the samples of one request.
pub(in crate::server::http) struct RoutedExperts {
    rules: RoutingRules,
    /// Number of the prompt's first tokens that are left out.
    start: usize,
    /// Rows of each prompt, of all its tokens.
    prompts: HashMap<usize, Vec<u8>>,
}

impl RoutedExperts {
    /// `None` if the server does not keep experts.
    pub(super) fn new(model: &ModelFacts, start: Option<usize>) -> Option<Self> {
        let rules = model.routing.clone().filter(|rules| rules.is_kept)?;
        Some(Self { rules, start: start.unwrap_or(0), prompts: HashMap::new() })
    }

    /// Takes the rows of a prompt.
    pub(in crate::server::http) fn keep_prompt(&mut self, prompt: usize, rows: Vec<u8>) {
        self.prompts.insert(prompt, rows);
    }

    /// Bytes that [`Self::written`] takes for a sample: the file, and four thirds of it as text.
    pub(super) fn written_bytes(&self, completion: &Completion) -> usize {
        const HEADER: usize = 256;
        let rows = self.rows(completion).map(<[u8]>::len).sum::<usize>();
        3 * (rows / self.rules.layers.len() * self.rules.num_layers + HEADER)
    }

    /// A file of numpy's in base64: uint8, or uint16 for more than 256 experts, of the shape `[tokens - 1, layers,
    /// top_k]`. A dense layer has zeros.
    pub(super) fn written(&self, completion: &Completion) -> String {
        let RoutingRules { layers, format, num_layers, .. } = &self.rules;
        let layer_bytes = format.top_k * format.expert_bytes();
        let tokens = self.rows(completion).map(|rows| rows.len() / format.row_bytes()).sum::<usize>();
        let descr = if format.expert_bytes() == 1 { "|u1" } else { "<u2" };
        let mut file = npy_header(descr, &[tokens, *num_layers, format.top_k]);
        for row in self.rows(completion).flat_map(|rows| rows.chunks_exact(format.row_bytes())) {
            let first = file.len();
            file.resize(first + num_layers * layer_bytes, 0);
            for (layer, experts) in layers.iter().zip(row.chunks_exact(layer_bytes)) {
                file[first + layer * layer_bytes..][..layer_bytes].copy_from_slice(experts);
            }
        }
        STANDARD.encode(file)
    }

    /// The rows of a sample's prompt from the start on, and of its tokens.
    fn rows<'a>(&'a self, completion: &'a Completion) -> impl Iterator<Item = &'a [u8]> {
        let prompt = self.prompts.get(&(completion.prompt_index as usize)).map_or(&[][..], Vec::as_slice);
        let skipped = self.start.saturating_mul(self.rules.format.row_bytes()).min(prompt.len());
        [&prompt[skipped..], &completion.routing].into_iter()
    }
}
