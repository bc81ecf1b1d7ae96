//! The order in which Qwen2.5-VL's tower takes the patches of a picture, and which of them see each other.

use std::ops::Range;

use crate::model::config::VisionConfig;

/// The patches of one picture as rows of the tower: the tokens of a window behind each other, windows row by row, and
/// the patches of a token behind each other.
pub(super) struct Geometry {
    /// For each token in the tower's order, its index in the picture's order, row by row.
    pub tokens: Vec<u32>,
    /// Row and column of each patch in the picture, counted in patches, `[rows, 2]`.
    pub positions: Vec<u32>,
    /// Pixel row and column of each patch's upper left corner.
    pub corners: Vec<[u32; 2]>,
    /// The rows of each window.
    pub windows: Vec<Range<usize>>,
}

impl Geometry {
    /// Lays out a picture with `grid` rows and columns of tokens in windows of so many tokens a side.
    pub fn new(config: &VisionConfig, window: usize, grid: [usize; 2]) -> Self {
        let ([rows, columns], merge, unit) = (grid, config.merge_size(), config.unit());
        let (mut tokens, mut windows) = (Vec::with_capacity(rows * columns), Vec::new());
        for top in (0..rows).step_by(window) {
            for left in (0..columns).step_by(window) {
                let first = tokens.len() * unit;
                for row in top..rows.min(top + window) {
                    let end = columns.min(left + window);
                    tokens.extend((left..end).map(|column| (row * columns + column) as u32));
                }
                windows.push(first..tokens.len() * unit);
            }
        }
        let place = |row: usize| {
            let (token, part) = (tokens[row / unit] as usize, row % unit);
            [token / columns * merge + part / merge, token % columns * merge + part % merge].map(|place| place as u32)
        };
        let places: Vec<[u32; 2]> = (0..tokens.len() * unit).map(place).collect();
        let corners = places.iter().map(|place| place.map(|patch| patch * config.preprocessor.patch_size)).collect();
        Self { positions: places.into_iter().flatten().collect(), corners, tokens, windows }
    }

    /// Number of patches.
    pub fn rows(&self) -> usize {
        self.corners.len()
    }

    /// Cuts the rows into chunks of at most `most` rows, which have whole windows: indices into `windows`.
    ///
    /// # Panics
    /// If a window has more rows than `most`.
    pub fn chunks(&self, most: usize) -> Vec<Range<usize>> {
        let mut chunks: Vec<Range<usize>> = Vec::new();
        for (index, window) in self.windows.iter().enumerate() {
            assert!(window.len() <= most, "a window of {} rows in chunks of {most}", window.len());
            match chunks.last_mut() {
                Some(chunk) if window.end - self.windows[chunk.start].start <= most => chunk.end = index + 1,
                _ => chunks.push(index..index + 1),
            }
        }
        chunks
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::model::config::ModelConfig;
    use crate::weights::ModelSource;

    fn config() -> VisionConfig {
        let path = format!("{}/tests/fixtures/qwen2_5_vl", env!("CARGO_MANIFEST_DIR"));
        let files = ModelSource::parse(&path).unwrap().open().unwrap();
        ModelConfig::from_files(&files).unwrap().vision.unwrap()
    }

    #[test]
    fn windows_come_row_by_row_and_are_smaller_at_the_edges() {
        let config = config();
        assert_eq!((config.merge_size(), config.token_side()), (2, 28));
        let geometry = Geometry::new(&config, 4, [5, 6]);
        let lengths: Vec<usize> = geometry.windows.iter().map(|window| window.len() / 4).collect();
        assert_eq!(lengths, [16, 8, 4, 2]);
        let first = [0, 1, 2, 3, 6, 7, 8, 9, 12, 13, 14, 15, 18, 19, 20, 21];
        let second = [4, 5, 10, 11, 16, 17, 22, 23];
        assert_eq!(geometry.tokens, [&first[..], &second, &[24, 25, 26, 27], &[28, 29]].concat());
        // The second token of the second row of the first window is in patch rows 2 and 3, patch columns 2 and 3.
        assert_eq!(geometry.positions[2 * 20..2 * 24], [2, 2, 2, 3, 3, 2, 3, 3]);
        assert_eq!(geometry.corners[21], [28, 42]);
    }

    #[test]
    fn chunks_have_whole_windows_and_all_rows() {
        let config = config();
        for grid in [[1, 1], [5, 6], [9, 13], [1, 40], [17, 2]] {
            let geometry = Geometry::new(&config, 4, grid);
            assert_eq!(geometry.rows(), grid[0] * grid[1] * 4);
            for most in [64, 100, 4096] {
                let chunks = geometry.chunks(most);
                let rows =
                    |chunk: &Range<usize>| geometry.windows[chunk.end - 1].end - geometry.windows[chunk.start].start;
                assert!(chunks.iter().all(|chunk| rows(chunk) <= most));
                assert_eq!(chunks.iter().map(rows).sum::<usize>(), geometry.rows());
                assert!(chunks.windows(2).all(|pair| pair[0].end == pair[1].start));
            }
        }
    }
}
