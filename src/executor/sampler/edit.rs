//! Edits of the logits before the temperature: masks, bias and penalties.

use crate::types::{History, LogitsTask, SamplingParams};

/// Marks a token of the prompt in `counts`; the bits below it count its occurrences in the output.
const IN_PROMPT: u32 = 1 << 31;

/// Writes the edited row to `edited` and returns true, or returns false if the task edits nothing. `counts` is all
/// zero (or shorter than the row) before and after.
pub fn apply(logits: &[f32], task: &LogitsTask, edited: &mut Vec<f32>, counts: &mut Vec<u32>) -> bool {
    let params = &*task.params;
    let masks_stops = task.output_index < params.min_tokens;
    if params.allowed_tokens.is_none() && !masks_stops && params.logit_bias.is_empty() && task.history.is_none() {
        return false;
    }
    edited.clear();
    match &params.allowed_tokens {
        None => edited.extend_from_slice(logits),
        Some(allowed) => {
            edited.resize(logits.len(), f32::NEG_INFINITY);
            for &token in allowed {
                edited[token as usize] = logits[token as usize];
            }
        }
    }
    if masks_stops {
        for &token in params.eos_token_ids.iter().chain(&params.stop_token_ids) {
            // A configuration may name an end-of-sequence token beyond the vocabulary; it cannot be sampled anyway.
            if let Some(x) = edited.get_mut(token as usize) {
                *x = f32::NEG_INFINITY;
            }
        }
    }
    for &(token, bias) in &params.logit_bias {
        edited[token as usize] += bias;
    }
    if let Some(history) = &task.history {
        penalise(edited, params, history, counts);
    }
    true
}

/// Repetition penalty on every token of `history`, frequency and presence penalty on those of its output.
fn penalise(logits: &mut [f32], params: &SamplingParams, history: &History, counts: &mut Vec<u32>) {
    counts.resize(counts.len().max(logits.len()), 0);
    let History { prompt, output } = history;
    for &token in prompt.iter() {
        counts[token as usize] |= IN_PROMPT;
    }
    for &token in output {
        counts[token as usize] += 1;
    }
    for &token in prompt.iter().chain(output) {
        let seen = std::mem::take(&mut counts[token as usize]);
        if seen == 0 {
            continue; // done at its first occurrence
        }
        let x = &mut logits[token as usize];
        if *x > 0.0 {
            *x /= params.repetition_penalty;
        } else {
            *x *= params.repetition_penalty;
        }
        let occurrences = seen & !IN_PROMPT;
        if occurrences > 0 {
            *x -= params.frequency_penalty * occurrences as f32;
            *x -= params.presence_penalty;
        }
    }
}
