//! The user as which the process opens files, and which files that user may read.

use std::fs::Metadata;
use std::os::unix::fs::MetadataExt;

/// A user and the groups it belongs to.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Identity {
    user: u32,
    groups: Vec<u32>,
}

impl Identity {
    /// The effective user and groups of this process, against which the system checks access.
    pub fn of_process() -> Self {
        let mut groups = vec![0; 64];
        // SAFETY: the calls take no pointer but `groups`, which is passed with its length, and have no other
        // preconditions.
        let (user, group, count) = unsafe {
            let room = groups.len() as libc::c_int;
            (libc::geteuid(), libc::getegid(), libc::getgroups(room, groups.as_mut_ptr()))
        };
        // With more groups than there is room for the count is -1, and only the first group counts.
        groups.truncate(usize::try_from(count).unwrap_or(0));
        groups.push(group);
        Self { user, groups }
    }

    /// Whether the mode of a file lets this user read it. That root may read any file does not count.
    pub fn is_let_read(&self, file: &Metadata) -> bool {
        self.is_let(file.uid(), file.gid(), file.mode())
    }

    /// Numeric id of the user.
    pub fn user(&self) -> u32 {
        self.user
    }

    fn is_let(&self, owner: u32, group: u32, mode: u32) -> bool {
        let let_group = mode & 0o040 != 0 && self.groups.contains(&group);
        owner == self.user || mode & 0o004 != 0 || let_group
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn files_of_others_are_read_where_their_mode_lets_us() {
        let me = Identity { user: 5, groups: vec![50, 51] };
        for (owner, group, mode, is_let) in [
            (5, 60, 0o100_600, true),
            (6, 60, 0o100_600, false),
            (6, 60, 0o100_640, false),
            (6, 51, 0o100_640, true),
            (6, 51, 0o100_620, false),
            (6, 60, 0o100_604, true),
        ] {
            assert_eq!(me.is_let(owner, group, mode), is_let, "{owner} {group} {mode:o}");
        }
        let root = Identity { user: 0, groups: vec![0] };
        assert!(!root.is_let(6, 60, 0o100_600), "root is let read nothing that it was not given");
    }

    #[test]
    fn the_process_owns_what_it_makes() {
        let file = tempfile::tempfile().unwrap();
        assert!(Identity::of_process().is_let_read(&file.metadata().unwrap()));
        assert_eq!(Identity::of_process().user(), file.metadata().unwrap().uid());
    }
}
