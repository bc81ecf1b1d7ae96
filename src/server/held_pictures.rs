//! Pictures that are held after their request, so that later requests can name them by their hashes.

use std::collections::HashMap;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use crate::types::{Picture, PictureHash};

/// Pictures of at most so many bytes together, of which the least recently used one is dropped first. Clones share
/// them.
#[derive(Clone, Debug)]
pub struct HeldPictures {
    max_bytes: u64,
    held: Arc<Mutex<Held>>,
}

#[derive(Debug, Default)]
struct Held {
    /// Each picture with the number of its last use.
    pictures: HashMap<PictureHash, (Picture, u64)>,
    bytes: u64,
    /// Number of uses so far.
    uses: u64,
}

impl HeldPictures {
    pub fn new(max_bytes: u64) -> Self {
        Self { max_bytes, held: Arc::default() }
    }

    /// The picture with this hash, if it is held.
    pub fn find(&self, hash: PictureHash) -> Option<Picture> {
        let mut held = self.lock();
        held.uses += 1;
        let uses = held.uses;
        let (picture, last_use) = held.pictures.get_mut(&hash)?;
        *last_use = uses;
        Some(picture.clone())
    }

    /// Holds a picture, unless it alone has more bytes than all may have.
    pub fn hold(&self, picture: &Picture) {
        let bytes = picture.rgb().len() as u64;
        if bytes > self.max_bytes {
            return;
        }
        let mut held = self.lock();
        held.uses += 1;
        let uses = held.uses;
        if let Some((_, last_use)) = held.pictures.get_mut(&picture.hash()) {
            *last_use = uses;
            return;
        }
        while held.bytes + bytes > self.max_bytes {
            let oldest = held.pictures.iter().min_by_key(|(_, (_, last_use))| *last_use);
            let (hash, dropped) =
                oldest.map(|(hash, (picture, _))| (*hash, picture.rgb().len() as u64)).expect("bytes");
            held.pictures.remove(&hash);
            held.bytes -= dropped;
        }
        held.pictures.insert(picture.hash(), (picture.clone(), uses));
        held.bytes += bytes;
    }

    /// Drops all pictures.
    pub fn clear(&self) {
        let mut held = self.lock();
        held.pictures.clear();
        held.bytes = 0;
    }

    /// Number of pictures.
    pub fn count(&self) -> usize {
        self.lock().pictures.len()
    }

    fn lock(&self) -> MutexGuard<'_, Held> {
        self.held.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn picture(shade: u8, columns: u32) -> Picture {
        Picture::new("image", columns, 1, 1, vec![shade; 3 * columns as usize]).unwrap()
    }

    #[test]
    fn the_least_recently_used_picture_is_dropped() {
        let held = HeldPictures::new(12);
        let [first, second, third] = [1, 2, 3].map(|shade| picture(shade, 2));
        held.hold(&first);
        held.hold(&second);
        assert_eq!(held.find(first.hash()), Some(first.clone()));
        held.hold(&third);
        assert_eq!((held.find(second.hash()), held.count()), (None, 2));
        held.hold(&first);
        held.hold(&picture(4, 1));
        assert_eq!((held.find(third.hash()), held.count()), (None, 2));
        held.hold(&picture(5, 5));
        assert_eq!(held.count(), 2, "no picture is dropped for one that cannot be held");
        held.clear();
        assert_eq!((held.find(first.hash()), held.count()), (None, 0));
        held.hold(&picture(6, 4));
        assert_eq!(held.count(), 1, "all bytes are free again");
    }
}
