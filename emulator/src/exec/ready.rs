//! Which threads of a block can run.

/// Picks a thread: the first of the warp that ran last, so that a warp goes as far as it can, or any with a seed.
#[derive(Default)]
pub struct Ready {
    /// Warps of which a thread can run.
    warps: u32,
    lanes: [u32; 32],
    /// The warp that ran last.
    current: u32,
    /// Lanes of each warp that wait for something that only shows when they look again.
    paused: [u32; 32],
    pausing: bool,
    /// State of the random order, or zero for the plain one.
    random: u64,
}

/// The `n`-th bit of `mask` that is set.
fn bit(mut mask: u32, n: u32) -> u32 {
    for _ in 0..n {
        mask &= mask - 1;
    }
    mask.trailing_zeros()
}

impl Ready {
    /// Starts again, with no thread ready. A seed of zero gives the plain order.
    pub fn clear(&mut self, seed: u64, block: u64) {
        let random = (seed ^ block << 16).wrapping_mul(0x9e37_79b9_7f4a_7c15) | 1;
        *self = Self { random: if seed == 0 { 0 } else { random }, ..Self::default() };
    }

    pub fn add(&mut self, warp: u32, lanes: u32) {
        self.lanes[warp as usize] |= lanes;
        self.warps |= u32::from(lanes != 0) << warp;
    }

    /// Lets a thread run again once no other thread can.
    pub fn pause(&mut self, warp: u32, lane: u32) {
        self.paused[warp as usize] |= 1 << lane;
        self.pausing = true;
    }

    /// Lets those run that have paused. Says whether there are any.
    pub fn resume(&mut self) -> bool {
        for warp in 0..32 {
            let lanes = std::mem::take(&mut self.paused[warp as usize]);
            self.add(warp, lanes);
        }
        std::mem::take(&mut self.pausing)
    }

    fn next_random(&mut self) -> u32 {
        self.random ^= self.random << 13;
        self.random ^= self.random >> 7;
        self.random ^= self.random << 17;
        (self.random >> 32) as u32
    }

    /// Takes out a thread that can run.
    pub fn take(&mut self) -> Option<u32> {
        if self.warps == 0 {
            return None;
        }
        let (warp, lane) = if self.random == 0 {
            let warp = self.current + (self.warps.rotate_right(self.current)).trailing_zeros();
            let warp = warp % 32;
            (warp, self.lanes[warp as usize].trailing_zeros())
        } else {
            let (x, y) = (self.next_random(), self.next_random());
            let warp = bit(self.warps, x % self.warps.count_ones());
            let lanes = self.lanes[warp as usize];
            (warp, bit(lanes, y % lanes.count_ones()))
        };
        self.current = warp;
        self.lanes[warp as usize] &= !(1 << lane);
        if self.lanes[warp as usize] == 0 {
            self.warps &= !(1 << warp);
        }
        Some(warp * 32 + lane)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn order(ready: &mut Ready) -> Vec<u32> {
        std::iter::from_fn(|| ready.take()).collect()
    }

    #[test]
    fn a_warp_goes_as_far_as_it_can() {
        let mut ready = Ready::default();
        ready.add(0, 0b110);
        ready.add(3, 0b1);
        assert_eq!(ready.take(), Some(1));
        ready.add(0, 0b1);
        assert_eq!(order(&mut ready), [0, 2, 96]);
    }

    #[test]
    fn each_thread_comes_once_in_every_order() {
        let mut orders = Vec::new();
        for seed in 0..4 {
            let mut ready = Ready::default();
            ready.clear(seed, 7);
            (0..3).for_each(|warp| ready.add(warp, 0xffff));
            let mut order = order(&mut ready);
            orders.push(order.clone());
            order.sort_unstable();
            assert_eq!(order, (0..96).filter(|i| i % 32 < 16).collect::<Vec<_>>());
        }
        orders.dedup();
        assert_eq!(orders.len(), 4, "each seed has its own order");
    }

    #[test]
    fn who_pauses_runs_after_the_others() {
        let mut ready = Ready::default();
        ready.add(0, 0b10);
        ready.pause(0, 0);
        assert_eq!(order(&mut ready), [1]);
        assert!(ready.resume());
        assert_eq!(order(&mut ready), [0]);
        assert!(!ready.resume());
    }
}
