//! Edits of the logits before the temperature: masks, bias and penalties.

use crate::sampling::{SamplingTask, is_set};

/// The bit of a token's count that marks it as one of the prompt; the bits below it count its occurrences in the
/// output.
const IN_PROMPT: u32 = 1 << 31;

/// Writes the edited row to `edited` and returns true, or returns false if the task edits nothing. `counts` is all zero
/// (or shorter than the row) before and after the call.
pub fn apply(logits: &[f32], task: &SamplingTask<'_>, edited: &mut Vec<f32>, counts: &mut Vec<u32>) -> bool {
    if !task.edits() {
        return false;
    }
    edited.clear();
    match (task.allowed, task.mask) {
        (None, None) => edited.extend_from_slice(logits),
        (None, Some(mask)) => masked(logits, mask, edited),
        (Some(allowed), mask) => {
            edited.resize(logits.len(), f32::NEG_INFINITY);
            for &token in allowed.iter().filter(|token| mask.is_none_or(|mask| is_set(mask, **token))) {
                edited[token as usize] = logits[token as usize];
            }
        }
    }
    for &token in task.banned.into_iter().flatten() {
        // A configuration may name an end-of-sequence token beyond the vocabulary, which cannot be sampled anyway.
        if let Some(x) = edited.get_mut(token as usize) {
            *x = f32::NEG_INFINITY;
        }
    }
    for &(token, bias) in task.logit_bias {
        edited[token as usize] += bias;
    }
    if let Some((prompt, output)) = task.history {
        penalise(edited, task, prompt, output, counts);
    }
    true
}

/// Appends the logits, with `-inf` for tokens that the mask leaves out.
fn masked(logits: &[f32], mask: &[u32], edited: &mut Vec<f32>) {
    for (logits, word) in logits.chunks(32).zip(mask.iter().copied().chain(std::iter::repeat(0))) {
        match word {
            0 => edited.extend(logits.iter().map(|_| f32::NEG_INFINITY)),
            u32::MAX => edited.extend_from_slice(logits),
            _ => {
                let keep = |(i, &x): (u32, &f32)| if word >> i & 1 == 1 { x } else { f32::NEG_INFINITY };
                edited.extend((0..).zip(logits).map(keep));
            }
        }
    }
}

/// Applies the repetition penalty to every token of the prompt and the output, and the frequency and presence penalties
/// to those of the output.
fn penalise(logits: &mut [f32], task: &SamplingTask<'_>, prompt: &[u32], output: &[u32], counts: &mut Vec<u32>) {
    counts.resize(counts.len().max(logits.len()), 0);
    for &token in prompt {
        counts[token as usize] |= IN_PROMPT;
    }
    for &token in output {
        counts[token as usize] += 1;
    }
    for &token in prompt.iter().chain(output) {
        let seen = std::mem::take(&mut counts[token as usize]);
        if seen == 0 {
            continue; // done at the token's first occurrence
        }
        let x = &mut logits[token as usize];
        if *x > 0.0 {
            *x /= task.repetition_penalty;
        } else {
            *x *= task.repetition_penalty;
        }
        let occurrences = seen & !IN_PROMPT;
        if occurrences > 0 {
            *x -= task.frequency_penalty * occurrences as f32;
            *x -= task.presence_penalty;
        }
    }
}
