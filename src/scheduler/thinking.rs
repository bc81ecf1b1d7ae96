//! The limit on the tokens of a sample's reasoning. A sample that has used it up gets the token that closes the
//! reasoning. That is a function of the sample's tokens alone, so it holds through preemption and speculation.

use crate::types::{ThinkingBudget, TokenId};

/// How much of its budget a sample has used.
#[derive(Clone, Copy, Debug)]
pub(super) struct Thinking {
    budget: ThinkingBudget,
    /// Number of tokens since the reasoning was opened; `None` outside of reasoning.
    spent: Option<u32>,
}

impl Thinking {
    /// The state after `prompt`. Reasoning that its last turn has opened counts; the tokens `ends` end a turn.
    pub fn new(budget: ThinkingBudget, prompt: &[TokenId], ends: &[TokenId]) -> Self {
        let mut thinking = Self { budget, spent: None };
        let turn = prompt.rsplit(|token| ends.contains(token)).next().unwrap_or_default();
        turn.iter().for_each(|token| thinking.push(*token));
        thinking
    }

    /// Takes the sample's next token.
    pub fn push(&mut self, token: TokenId) {
        self.spent = match self.spent {
            _ if token == self.budget.close => None,
            None => (token == self.budget.open).then_some(0),
            Some(spent) => Some(spent.saturating_add(1)),
        };
    }

    /// The next token, if it is not to be drawn.
    pub fn forced(&self) -> Option<TokenId> {
        self.spent.filter(|spent| *spent >= self.budget.tokens).map(|_| self.budget.close)
    }

    /// Number of the first drafts after each of which a token is drawn, if one is now.
    pub fn drawn_after(mut self, drafts: &[TokenId]) -> usize {
        if self.forced().is_some() {
            return 0;
        }
        let is_forced_after = |draft: &TokenId| {
            self.push(*draft);
            self.forced().is_some()
        };
        drafts.iter().position(is_forced_after).unwrap_or(drafts.len())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const OPEN: TokenId = 8;
    const CLOSE: TokenId = 9;
    const END: TokenId = 2;

    fn after(tokens: u32, prompt: &[TokenId]) -> Thinking {
        Thinking::new(ThinkingBudget { tokens, open: OPEN, close: CLOSE }, prompt, &[END])
    }

    #[test]
    fn the_mark_is_forced_when_the_budget_is_used_up() {
        for (tokens, sequence, is_forced) in [
            (0, &[1, 1][..], false),
            (0, &[1, OPEN], true),
            (2, &[OPEN], false),
            (2, &[OPEN, 1], false),
            (2, &[OPEN, 1, OPEN], true),
            (2, &[OPEN, 1, 1, 1], true),
            (2, &[OPEN, 1, CLOSE, 1, 1], false),
            (2, &[OPEN, 1, CLOSE, OPEN, 1], false),
            (1, &[OPEN, 1, CLOSE, OPEN, 1], true),
            (0, &[1, OPEN, 1, END, 1], false),
            (0, &[OPEN, CLOSE, END, 1, OPEN], true),
        ] {
            for split in 0..=sequence.len() {
                // A turn that ends among the outputs ends the sample, so that no token follows.
                if sequence[split..].contains(&END) {
                    continue;
                }
                let mut thinking = after(tokens, &sequence[..split]);
                sequence[split..].iter().for_each(|token| thinking.push(*token));
                assert_eq!(thinking.forced(), is_forced.then_some(CLOSE), "{tokens} {sequence:?} {split}");
            }
        }
    }

    #[test]
    fn drafts_end_before_a_token_that_is_forced() {
        assert_eq!(after(3, &[OPEN]).drawn_after(&[1, 1, 1, 1]), 2);
        assert_eq!(after(3, &[OPEN]).drawn_after(&[1, CLOSE, 1, 1, 1, 1]), 6);
        assert_eq!(after(0, &[OPEN]).drawn_after(&[CLOSE, 1]), 0);
        assert_eq!(after(1, &[1]).drawn_after(&[1, OPEN, 1, 1]), 2);
        assert_eq!(after(0, &[1]).drawn_after(&[1, OPEN, 1]), 1);
        assert_eq!(after(9, &[OPEN]).drawn_after(&[]), 0);
    }
}
