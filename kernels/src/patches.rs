//! The pixels of a picture, and how they become the rows that a vision tower reads.

/// Square patches of a picture for [`Ops::patches`](crate::Ops::patches), and how their values are normalised.
#[derive(Clone, Copy, Debug)]
pub struct Patches<'a> {
    /// The picture's pixels, row by row: 3 bytes each.
    pub rgb: &'a [u8],
    /// Pixels of a row of the picture.
    pub width: usize,
    /// Pixels of a patch's side.
    pub side: usize,
    /// How often a patch's row has each channel: a still picture stands in all frames of a tower for videos.
    pub frames: usize,
    /// For pixels of 0 to 255: a processor's mean of each channel times 255.
    pub mean: [f32; 3],
    /// As `mean`, of its standard deviation.
    pub std: [f32; 3],
    /// The row and the column of the pixel at the top left of each patch.
    pub corners: &'a [[u32; 2]],
}

impl Patches<'_> {
    /// Values of a patch's row.
    pub(crate) fn row_width(&self) -> usize {
        3 * self.frames * self.side * self.side
    }

    /// Row `y` of the pixels of a patch: 3 bytes each.
    pub(crate) fn pixels(&self, corner: [u32; 2], y: usize) -> &[u8] {
        let [row, column] = corner.map(|at| at as usize);
        &self.rgb[3 * ((row + y) * self.width + column)..][..3 * self.side]
    }

    /// # Panics
    /// If the pixels do not make whole rows of the picture's width, or a patch is empty or not within the picture.
    pub(crate) fn check(&self) {
        let Self { rgb, width, side, frames, .. } = *self;
        assert!(side > 0 && frames > 0, "patches of {side} pixels in {frames} frames");
        assert!(width > 0 && rgb.len().is_multiple_of(3 * width), "{} bytes are no rows of {width} pixels", rgb.len());
        let height = rgb.len() / (3 * width);
        for [row, column] in self.corners {
            let is_within = *row as usize + side <= height && *column as usize + side <= width;
            assert!(is_within, "a patch of {side} pixels at row {row}, column {column} of {height} x {width}");
        }
    }
}
