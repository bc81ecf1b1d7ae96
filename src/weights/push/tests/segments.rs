//! Segments of clients that die.

use std::path::{Path, PathBuf};

use super::super::transport::Segments;
use super::sources::Segment;

/// A segment whose client locks it as the Python client does, until the file is dropped.
fn locked(test: &str, bytes: &[u8]) -> (PathBuf, std::fs::File) {
    let path = Path::new("/dev/shm").join(format!("rollout-test-{}-{test}", std::process::id()));
    std::fs::write(&path, bytes).unwrap();
    let file = std::fs::File::open(&path).unwrap();
    file.lock().unwrap();
    (path, file)
}

#[test]
fn a_segment_is_removed_once_its_client_has_died_and_not_before() {
    let segments = Segments::default();
    let name = |path: &Path| path.file_name().unwrap().to_str().unwrap().to_string();
    let (path, client) = locked("dies", &[1; 100]);
    let (other, _alive) = locked("lives", &[1; 100]);
    for path in [&path, &other, &path] {
        segments.open(&name(path)).unwrap();
    }
    segments.release_removed();
    assert!(path.exists() && other.exists(), "both clients live");
    drop(client);
    segments.release_removed();
    assert!(!path.exists() && other.exists(), "one has died");
    assert!(!std::fs::read_to_string("/proc/self/maps").unwrap().contains(&name(&path)), "its memory is in use");
    std::fs::remove_file(other).unwrap();
}

#[test]
fn a_segment_that_is_not_known_to_be_a_dead_clients_is_left_alone() {
    let segments = Segments::default();
    // Nobody ever held its lock: the client may live without one.
    let unlocked = Segment::new("unlocked", &[1; 100]);
    segments.open(&unlocked.name()).unwrap();
    // The client has died, and its name is another file's.
    let (path, client) = locked("renewed", &[1; 100]);
    segments.open(path.file_name().unwrap().to_str().unwrap()).unwrap();
    let moved = path.with_extension("moved");
    std::fs::rename(&path, &moved).unwrap();
    std::fs::write(&path, [2; 100]).unwrap();
    drop(client);
    segments.release_removed();
    assert!(unlocked.0.exists() && path.exists() && moved.exists());
    std::fs::remove_file(path).unwrap();
    std::fs::remove_file(moved).unwrap();
}
