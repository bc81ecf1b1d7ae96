//! Quotas of tenants, and their numbers.

use super::harness::*;
use super::rules::{BLOCK_SIZE, config, prompt};
use super::tenants::tenant;
use crate::scheduler::*;
use crate::types::*;

fn limited(quotas: TenantQuotas) -> Harness {
    let mut harness = Harness::new(config(8, 100), 24, BLOCK_SIZE);
    harness.scheduler.limit_tenants(quotas);
    harness
}

/// The numbers of a tenant.
fn stats(harness: &mut Harness, name: &Tenant) -> TenantStats {
    let all = harness.scheduler.tenant_stats();
    all.iter().find(|(named, _)| named == name).expect("a tenant that has asked for something").1
}

#[test]
fn a_tenant_runs_no_more_samples_than_its_quota() {
    let mut harness = limited(TenantQuotas { max_running: Some(2), kv_share: None });
    harness.add_for(&tenant(0), vec![group(key(0, 0), &prompt(4), 5, 6)]).expect("room");
    harness.add_for(&tenant(1), vec![group(key(1, 0), &prompt(4), 2, 3)]).expect("room");
    let mut most = [0, 0];
    while harness.scheduler.has_work() {
        harness.step();
        for (number, most) in most.iter_mut().enumerate() {
            *most = (*most).max(stats(&mut harness, &tenant(number as u64)).running_samples);
        }
    }
    assert_eq!(most, [2, 2]);
    assert!(harness.results.values().all(|result| result.done));
}

#[test]
fn a_tenant_holds_no_more_blocks_than_its_share_but_for_one_sequence() {
    let mut harness = limited(TenantQuotas { max_running: None, kv_share: Some(0.25) });
    let groups = (0..4).map(|index| group(key(0, index), &[index; 5], 1, 12)).collect();
    harness.add_for(&tenant(0), groups).expect("room");
    let mut most = 0;
    while harness.scheduler.has_work() {
        harness.step();
        most = most.max(stats(&mut harness, &tenant(0)).kv_blocks);
    }
    // Three run, and may each get one block more before the next step preempts the youngest.
    assert!((5..=6 + 3).contains(&most), "{most} of 6 blocks");
    harness.add_for(&tenant(0), vec![group(key(1, 0), &prompt(40), 1, 4)]).expect("room");
    harness.run();
    assert!(harness.results.values().all(|result| result.done), "one that needs more runs alone");
}

#[test]
fn the_numbers_of_tenants_are_their_own() {
    let mut harness = limited(TenantQuotas::default());
    harness.add_for(&tenant(0), vec![group(key(0, 0), &prompt(9), 10, 3)]).expect("room");
    harness.add_for(&tenant(1), vec![group(key(1, 0), &[2; 5], 1, 4)]).expect("room");
    (0..2).for_each(|_| drop(harness.step()));
    let [first, second] = [0, 1].map(|number| stats(&mut harness, &tenant(number)));
    assert_eq!((first.running_samples + first.waiting_samples, first.prompt_tokens), (10, 9));
    assert_eq!((second.running_samples, second.waiting_samples, second.kv_blocks), (1, 0, 2));
    let totals = harness.scheduler.stats();
    assert_eq!(first.kv_blocks + second.kv_blocks, totals.total_blocks - totals.free_blocks);
    assert_eq!(first.generated_tokens + second.generated_tokens, totals.generated_tokens);
    harness.run();
    let ended = stats(&mut harness, &tenant(0));
    assert_eq!(ended, TenantStats { prompt_tokens: 9, generated_tokens: 30, ..TenantStats::default() });
}

#[test]
fn further_tenants_share_one_row() {
    let mut harness = limited(TenantQuotas::default());
    for number in 0..100 {
        harness.add_for(&tenant(number), vec![group(key(number, 0), &prompt(3), 1, 1)]).expect("room");
        harness.run();
    }
    let rows = harness.scheduler.tenant_stats();
    let (name, last) = &rows[TenantStats::MOST - 1];
    assert_eq!((rows.len(), name.as_str(), last.prompt_tokens), (TenantStats::MOST, "other", 3 * 37));
}
