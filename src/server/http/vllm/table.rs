//! `prompt_logprob_token_ids` of `/inference/v1/generate`: a table of tokens, and that of their log-probabilities.

use base64::Engine as _;
use base64::engine::general_purpose::STANDARD;

use crate::error::{Error, Result};
use crate::server::http::npy::npy_header;
use crate::server::pb;
use crate::types::TokenId;

const TOKEN_IDS: &str = "sampling_params.prompt_logprob_token_ids";
const START: &str = "sampling_params.prompt_logprob_start";
/// Stands in a row for no token, to make rows equally long.
const PADDING: i32 = -1;

/// The tokens of each row, and padding.
pub(super) struct LogprobTable(Vec<Vec<i32>>);

impl LogprobTable {
    /// The table that the members ask for, if they do, for a prompt of `prompt_tokens` tokens.
    ///
    /// # Errors
    /// `InvalidArgument` if a stream asks for it, or if it has not one row for each token after `start`.
    pub(super) fn new(
        rows: Option<Vec<Vec<i32>>>,
        start: Option<usize>,
        prompt_tokens: usize,
        is_stream: bool,
    ) -> Result<Option<Self>> {
        let Some(rows) = rows else {
            return match start {
                Some(_) => Err(Error::invalid(START, "needs prompt_logprob_token_ids; give both or neither")),
                None => Ok(None),
            };
        };
        if is_stream {
            return Err(Error::invalid(TOKEN_IDS, "are not available in a stream; leave out one of the two"));
        }
        let (given, wanted) = (rows.len(), prompt_tokens.saturating_sub(1).saturating_sub(start.unwrap_or(0)));
        if given != wanted {
            let message = format!(
                "{given} rows, and the prompt has {wanted} scored rows (its tokens - 1 - prompt_logprob_start); give \
                 one for each"
            );
            return Err(Error::invalid(TOKEN_IDS, message));
        }
        if rows.iter().all(Vec::is_empty) {
            return Err(Error::invalid(TOKEN_IDS, "has no tokens; name some, or leave it out"));
        }
        for (row, ids) in rows.iter().enumerate() {
            if let Some(i) = ids.iter().position(|id| *id < PADDING) {
                let message = format!("{} is neither -1 nor a token", ids[i]);
                return Err(Error::invalid(format!("{TOKEN_IDS}[{row}][{i}]"), message));
            }
        }
        Ok(Some(Self(rows)))
    }

    /// The tokens of each row as a gRPC client would send them.
    pub(super) fn named(&self) -> Vec<pb::TokenIds> {
        let named = |row: &Vec<i32>| row.iter().filter_map(|id| TokenId::try_from(*id).ok()).collect();
        self.0.iter().map(|row| pb::TokenIds { ids: named(row) }).collect()
    }

    fn width(&self) -> usize {
        self.0.iter().map(Vec::len).max().unwrap_or(0)
    }

    /// Size on the heap in bytes.
    pub(super) fn bytes(&self) -> usize {
        self.0.iter().map(|row| size_of_val(row) + row.capacity() * size_of::<i32>()).sum()
    }

    /// Bytes that [`Self::written`] takes: the file, and four thirds of it as text.
    pub(super) fn written_bytes(&self) -> usize {
        const HEADER: usize = 256;
        3 * (self.0.len() * self.width() * size_of::<f32>() + HEADER)
    }

    /// The table as a file of numpy's in base64, with the log-probabilities of each row's tokens.
    pub(super) fn written(&self, logprobs: &[Vec<(TokenId, f32)>]) -> String {
        let (rows, width) = (self.0.len(), self.width());
        let mut file = npy_header("<f4", &[rows, width]);
        file.reserve_exact(rows * width * size_of::<f32>());
        for (row, logprobs) in self.0.iter().zip(logprobs) {
            let mut logprobs = logprobs.iter();
            let values = (0..width).map(|i| match row.get(i) {
                None | Some(&PADDING) => f32::NEG_INFINITY,
                Some(_) => logprobs.next().map_or(f32::NAN, |(_, logprob)| *logprob),
            });
            file.extend(values.flat_map(f32::to_le_bytes));
        }
        STANDARD.encode(file)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn table(rows: &[&[i32]], start: Option<usize>, prompt_tokens: usize) -> Result<Option<LogprobTable>> {
        LogprobTable::new(Some(rows.iter().map(|row| row.to_vec()).collect()), start, prompt_tokens, false)
    }

    fn refusal(table: Result<Option<LogprobTable>>) -> String {
        table.err().expect("refused").to_string()
    }

    #[test]
    fn it_has_a_row_for_each_token_after_the_start() {
        let named = |table: Result<Option<LogprobTable>>| -> Vec<Vec<u32>> {
            table.unwrap().unwrap().named().into_iter().map(|row| row.ids).collect()
        };
        assert_eq!(named(table(&[&[7], &[-1, 8, -1], &[]], None, 4)), [vec![7], vec![8], vec![]]);
        assert_eq!(named(table(&[&[7]], Some(2), 4)), [vec![7]]);
        assert!(LogprobTable::new(None, None, 4, true).unwrap().is_none());
        for (rows, start, tokens) in [(&[&[7][..]][..], None, 4), (&[&[7]], Some(1), 4), (&[&[7]], Some(9), 4)] {
            assert!(refusal(table(rows, start, tokens)).contains("1 rows, and the prompt has"), "{start:?}");
        }
        assert!(refusal(table(&[], None, 1)).contains("has no tokens"));
        assert!(refusal(table(&[&[], &[]], None, 3)).contains("has no tokens"));
        let wrong = refusal(table(&[&[1], &[2, -2]], None, 3));
        assert_eq!(wrong, "sampling_params.prompt_logprob_token_ids[1][1]: -2 is neither -1 nor a token");
        assert!(refusal(LogprobTable::new(None, Some(0), 4, false)).contains("needs prompt_logprob_token_ids"));
        assert!(refusal(LogprobTable::new(Some(vec![vec![1]]), None, 2, true)).contains("in a stream"));
    }

    #[test]
    fn it_is_written_as_numpy_writes_it() {
        let table = table(&[&[7], &[-1, 8]], None, 3).unwrap().unwrap();
        let text = table.written(&[vec![(7, -0.5)], vec![(8, -2.0)]]);
        let file = STANDARD.decode(&text).unwrap();
        assert!(file.capacity() + text.capacity() <= table.written_bytes());
        let (head, data) = file.split_at(128);
        assert_eq!(head[..10], *b"\x93NUMPY\x01\x00\x76\x00");
        let text = std::str::from_utf8(&head[10..]).unwrap();
        assert!(
            text.starts_with("{'descr': '<f4', 'fortran_order': False, 'shape': (2, 2), }  ") && text.ends_with('\n')
        );
        let values: Vec<f32> = data.chunks(4).map(|x| f32::from_le_bytes(x.try_into().unwrap())).collect();
        assert_eq!(values, [-0.5, f32::NEG_INFINITY, f32::NEG_INFINITY, -2.0]);
    }
}
