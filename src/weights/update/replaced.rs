//! Names of the parameters whose base is no longer the checkpoint's.

use std::collections::HashSet;

/// The parameters whose base a push has replaced. A FULL push adds all of them between two steps, so that is done
/// without a look at each.
#[derive(Debug, Default)]
pub struct Replaced {
    names: HashSet<String>,
    /// Whether these are all parameters but `names`.
    is_all_but: bool,
}

impl Replaced {
    pub fn contains(&self, parameter: &str) -> bool {
        self.names.contains(parameter) != self.is_all_but
    }

    /// Whether no parameter is replaced.
    pub fn is_empty(&self) -> bool {
        self.names.is_empty() && !self.is_all_but
    }

    pub fn insert(&mut self, parameter: &str) {
        if self.is_all_but {
            self.names.remove(parameter);
        } else if !self.names.contains(parameter) {
            self.names.insert(parameter.to_string());
        }
    }

    /// Adds every parameter that is not `kept`. Those that are stay as they are.
    pub fn insert_all_but(&mut self, kept: &HashSet<String>) {
        self.names = kept.iter().filter(|name| !self.contains(name)).cloned().collect();
        self.is_all_but = true;
    }

    pub fn clear(&mut self) {
        *self = Self::default();
    }
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeSet;

    use rand::rngs::StdRng;
    use rand::{Rng, SeedableRng};

    use super::*;

    #[test]
    fn it_contains_what_a_plain_set_would() {
        let all: Vec<String> = (0..6).map(|i| format!("p{i}")).collect();
        for seed in 0..300 {
            let mut rng = StdRng::seed_from_u64(seed);
            let (mut replaced, mut plain) = (Replaced::default(), BTreeSet::new());
            for step in 0..8 {
                match rng.random_range(0..5) {
                    0 => {
                        replaced.clear();
                        plain.clear();
                    }
                    1 => {
                        let kept = all.iter().filter(|_| rng.random_bool(0.3)).cloned().collect::<HashSet<_>>();
                        replaced.insert_all_but(&kept);
                        plain.extend(all.iter().filter(|name| !kept.contains(*name)).cloned());
                    }
                    _ => {
                        let name = &all[rng.random_range(0..all.len())];
                        replaced.insert(name);
                        plain.insert(name.clone());
                    }
                }
                for name in &all {
                    assert_eq!(replaced.contains(name), plain.contains(name), "seed {seed}, step {step}: {name}");
                }
                assert!(plain.is_empty() || !replaced.is_empty(), "seed {seed}, step {step}");
                assert!(replaced.is_all_but || plain.is_empty() == replaced.is_empty(), "seed {seed}, step {step}");
            }
        }
    }
}
