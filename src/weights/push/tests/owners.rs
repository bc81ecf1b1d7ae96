use std::os::unix::fs::{MetadataExt, PermissionsExt};

use super::sources::{Segment, from_segment, lay_out};
use super::*;

/// Run as root, this tests what the rule is for, because the system lets root read every file.
#[test]
fn segments_of_others_are_read_only_if_they_let_us() {
    let parameters = model(true);
    let mut rng = rng(23);
    let mut push = random_push(&mut rng, &parameters);
    let segment = Segment::new("of-another", &lay_out(&mut rng, &mut push));
    let open = || from_segment(UpdateKind::Full, &push, &segment.name(), &parameters);
    let mine = std::fs::metadata(&segment.0).unwrap();
    let set = |owner: u32, group: u32, mode| {
        std::fs::set_permissions(&segment.0, std::fs::Permissions::from_mode(mode)).unwrap();
        // Only root can give the file to another user. Otherwise it stays this user's, and may be read.
        std::os::unix::fs::chown(&segment.0, Some(owner), Some(group)).is_ok()
    };
    let (user, group) = (mine.uid() + 1234, mine.gid() + 1234);
    for (owner, group, mode, is_let) in [
        (mine.uid(), mine.gid(), 0o600, true),
        (user, group, 0o600, false),
        (user, group, 0o640, false),
        (user, mine.gid(), 0o640, true),
        (user, group, 0o644, true),
    ] {
        let is_let = !set(owner, group, mode) || is_let;
        match open() {
            Ok(_) => assert!(is_let, "{owner} {group} {mode:o}"),
            Err(Error::NotFound(message)) => {
                assert!(!is_let && message.contains("segment_mode"), "{owner} {group} {mode:o}: {message}");
            }
            Err(other) => panic!("{owner} {group} {mode:o}: {other}"),
        }
    }
}
