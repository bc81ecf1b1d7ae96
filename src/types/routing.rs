//! The experts that tokens take in the layers of a mixture-of-experts model.

use std::ops::Range;
use std::sync::Arc;

/// How a token's experts are written: a row has `top_k` experts of each layer that has experts, layer by layer, that
/// with the largest weight first. An expert takes one byte where a layer has at most 256, else two, little-endian.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct RoutingFormat {
    /// Layers with experts.
    pub layers: usize,
    /// Experts that each token takes.
    pub top_k: usize,
    /// Experts of a layer.
    pub experts: usize,
}

/// The experts that a prompt's tokens are to take: rows of consecutive tokens. A clone shares them.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ForcedRouting {
    first_token: usize,
    row_bytes: usize,
    rows: Arc<[u8]>,
}

impl RoutingFormat {
    /// Experts of a row.
    pub fn row_experts(&self) -> usize {
        self.layers * self.top_k
    }

    /// Bytes of an expert.
    pub fn expert_bytes(&self) -> usize {
        if self.experts <= 256 { 1 } else { 2 }
    }

    /// Bytes of a row.
    pub fn row_bytes(&self) -> usize {
        self.row_experts() * self.expert_bytes()
    }

    /// Appends experts to `rows`.
    pub fn write(&self, experts: &[u16], rows: &mut Vec<u8>) {
        match self.expert_bytes() {
            1 => rows.extend(experts.iter().map(|expert| *expert as u8)),
            _ => rows.extend(experts.iter().flat_map(|expert| expert.to_le_bytes())),
        }
    }

    /// The experts of `rows`.
    pub fn read<'a>(&self, rows: &'a [u8]) -> impl Iterator<Item = u16> + 'a {
        rows.chunks_exact(self.expert_bytes()).map(|expert| match *expert {
            [low, high] => u16::from_le_bytes([low, high]),
            _ => expert[0].into(),
        })
    }
}

impl ForcedRouting {
    /// `rows` are those of consecutive tokens from the one with the index `first_token` on, `row_bytes` each.
    ///
    /// # Panics
    /// If there is no row, or one is not whole.
    pub fn new(first_token: usize, row_bytes: usize, rows: impl Into<Arc<[u8]>>) -> Self {
        let rows = rows.into();
        assert!(!rows.is_empty() && rows.len().is_multiple_of(row_bytes), "{} bytes of rows", rows.len());
        Self { first_token, row_bytes, rows }
    }

    /// The tokens that have rows.
    pub fn tokens(&self) -> Range<usize> {
        self.first_token..self.first_token + self.rows.len() / self.row_bytes
    }

    /// Those of `tokens` that have rows, and the rows.
    pub fn within(&self, tokens: Range<usize>) -> Option<(Range<usize>, &[u8])> {
        let own = self.tokens();
        let tokens = own.start.max(tokens.start)..own.end.min(tokens.end);
        let row = |token: usize| (token - own.start) * self.row_bytes;
        (!tokens.is_empty()).then(|| (tokens.clone(), &self.rows[row(tokens.start)..row(tokens.end)]))
    }

    /// Size of the rows, which all clones share, in bytes.
    pub fn heap_bytes(&self) -> usize {
        self.rows.len()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn experts_take_one_byte_up_to_256_and_two_beyond() {
        for (experts, expected) in [(256, &[0, 255, 7][..]), (257, &[0, 0, 255, 0, 7, 0])] {
            let format = RoutingFormat { layers: 1, top_k: 3, experts };
            let mut rows = Vec::new();
            format.write(&[0, 255, 7], &mut rows);
            assert_eq!((rows.len(), &rows[..]), (format.row_bytes(), expected));
            assert_eq!(format.read(&rows).collect::<Vec<_>>(), [0, 255, 7]);
        }
    }

    #[test]
    fn rows_of_a_range_are_those_of_its_tokens() {
        let routing = ForcedRouting::new(3, 2, [0, 1, 2, 3, 4, 5]);
        assert_eq!(routing.tokens(), 3..6);
        assert_eq!(routing.within(0..3), None);
        assert_eq!(routing.within(6..9), None);
        assert_eq!(routing.within(0..4), Some((3..4, &[0, 1][..])));
        assert_eq!(routing.within(4..5), Some((4..5, &[2, 3][..])));
        assert_eq!(routing.within(5..9), Some((5..6, &[4, 5][..])));
    }
}
