//! Shares, penalties, turns and charges; and a property test of the sums.

use proptest::prelude::*;

use super::*;

const SECOND: Duration = Duration::from_secs(1);
const MIB: u64 = 1 << 20;

fn near(nic: usize) -> Candidate {
    Candidate { nic, distance: Distance::Near }
}

/// NICs that were seen at these speeds, in MiB a second.
fn with_speeds(speeds: &[u64]) -> Chooser {
    let mut chooser = Chooser::new(speeds.len(), Mode::Score);
    speeds.iter().enumerate().for_each(|(nic, speed)| chooser.observe(nic, speed * MIB, SECOND));
    chooser
}

/// How often each NIC is taken if all that is chosen stays in flight.
fn fill(chooser: &mut Chooser, candidates: &[Candidate], choices: usize) -> Vec<usize> {
    let mut taken = vec![0; chooser.nics.len()];
    for chance in 0..choices as u64 {
        let (at, charged) = chooser.choose(candidates, MIB, chance).expect("there are some");
        assert_eq!(charged, Charged { nic: candidates[at].nic, bytes: MIB });
        taken[candidates[at].nic] += 1;
    }
    taken
}

#[test]
fn what_is_in_flight_follows_the_speeds() {
    let mut chooser = with_speeds(&[300, 100, 200]);
    let taken = fill(&mut chooser, &[near(0), near(1), near(2)], 600);
    for (taken, ideal) in taken.into_iter().zip([300_usize, 100, 200]) {
        // Six choices of the 600 are made in turn.
        assert!(taken.abs_diff(ideal) <= 6, "{taken} of {ideal}");
    }
}

#[test]
fn distance_costs_five_and_ten_times_as_much() {
    for (distance, times) in [(Distance::Near, 1), (Distance::Far, 5), (Distance::Farthest, 10)] {
        let mut chooser = with_speeds(&[100, 100]);
        let taken = fill(&mut chooser, &[near(0), Candidate { nic: 1, distance }], 1100);
        let ideal = 1100 / (times + 1);
        assert!(taken[1].abs_diff(ideal) <= 12, "{taken:?} at {times}");
    }
}

#[test]
fn the_nearest_of_a_nics_paths_is_taken() {
    let mut chooser = with_speeds(&[100]);
    let far = Candidate { nic: 0, distance: Distance::Far };
    for chance in 0..300 {
        let (at, charged) = chooser.choose(&[far, near(0), far], MIB, chance).expect("three");
        assert_eq!(at, 1);
        chooser.release(charged);
    }
}

#[test]
fn chance_decides_among_equals_only() {
    let mut chooser = with_speeds(&[100, 100, 50]);
    let mut pick = |chance| {
        let (at, charged) = chooser.choose(&[near(0), near(1), near(2)], MIB, chance).expect("three");
        chooser.release(charged);
        at
    };
    assert_eq!([pick(0), pick(1), pick(2), pick(3)], [0, 1, 0, 1]);
}

#[test]
fn every_hundredth_choice_is_made_in_turn() {
    let mut chooser = with_speeds(&[1000, 1]);
    let mut slow = Vec::new();
    for choice in 1..=1000_u32 {
        let (at, charged) = chooser.choose(&[near(0), near(1)], MIB, 0).expect("two");
        if at == 1 {
            slow.push(choice);
        }
        chooser.release(charged);
    }
    assert_eq!(slow, [200, 400, 600, 800, 1000], "every other turn is the slow one's");
}

#[test]
fn a_nic_that_has_become_fast_is_found_by_its_turns() {
    let mut chooser = with_speeds(&[100, 100]);
    (0..100).for_each(|_| chooser.observe(1, MIB, SECOND));
    assert_eq!(chooser.estimate(1), Some(10 * MIB), "a tenth of the nominal, and not less");
    let mut last = 0;
    for _ in 0..20_000 {
        let (at, charged) = chooser.choose(&[near(0), near(1)], MIB, 0).expect("two");
        chooser.observe(at, [100, 400][at] * MIB, SECOND);
        chooser.release(charged);
        last = at;
    }
    assert_eq!(last, 1);
}

#[test]
fn the_baseline_takes_the_nearest_in_turn_whatever_their_speed() {
    let mut chooser = Chooser::new(3, Mode::RoundRobin);
    [1000, 1, 1].iter().enumerate().for_each(|(nic, speed)| chooser.observe(nic, speed * MIB, SECOND));
    let far = Candidate { nic: 2, distance: Distance::Far };
    assert_eq!(fill(&mut chooser, &[near(0), near(1), far], 300), [150, 150, 0]);
    assert_eq!(fill(&mut chooser, &[far], 10), [0, 0, 10], "the nearest there are");
}

#[test]
fn an_estimate_is_a_tenth_new_and_stays_within_ten_times_either_way() {
    let mut chooser = with_speeds(&[100]);
    chooser.observe(0, 200 * MIB, SECOND);
    assert_eq!(chooser.estimate(0), Some(110 * MIB));
    chooser.observe(0, TELLING_BYTES - 1, Duration::from_secs(1000));
    assert_eq!(chooser.estimate(0), Some(110 * MIB), "few bytes say nothing");
    (0..200).for_each(|_| chooser.observe(0, u64::MAX, Duration::ZERO));
    assert_eq!(chooser.estimate(0), Some(1000 * MIB));
    (0..200).for_each(|_| chooser.observe(0, TELLING_BYTES, Duration::MAX));
    assert_eq!(chooser.estimate(0), Some(10 * MIB));
}

#[test]
fn the_unknown_is_taken_for_the_best() {
    let mut chooser = Chooser::new(3, Mode::Score);
    chooser.observe(0, 10 * MIB, SECOND);
    chooser.observe(1, 20 * MIB, SECOND);
    let taken = fill(&mut chooser, &[near(0), near(1), near(2)], 50);
    assert_eq!(taken, [10, 20, 20]);
}

#[test]
fn nothing_to_choose_from_is_nothing_chosen() {
    for mode in [Mode::Score, Mode::RoundRobin] {
        assert_eq!(Chooser::new(0, mode).choose(&[], 1, 0), None);
        let mut chooser = Chooser::new(2, mode);
        assert!((0..300).all(|chance| chooser.choose(&[], 1, chance).is_none()));
    }
}

#[test]
fn shares_follow_the_inverse_of_the_scores() {
    let chooser = with_speeds(&[300, 100]);
    assert_eq!(chooser.shares(&[near(0), near(1)], MIB, 64), [48, 16]);
    let far = Candidate { nic: 1, distance: Distance::Far };
    assert_eq!(chooser.shares(&[near(0), far], MIB, 64), [60, 4]);
    assert_eq!(chooser.shares(&[near(1)], MIB, 7), [7]);
    assert_eq!(chooser.shares(&[], MIB, 7), [0; 0]);
}

proptest! {
    #[test]
    fn shares_are_all_pieces(speeds in proptest::collection::vec(1_u64..1 << 40, 1..16), pieces in 0_u32..100, bytes in any::<u64>()) {
        let mut chooser = Chooser::new(speeds.len(), Mode::Score);
        speeds.iter().enumerate().for_each(|(nic, speed)| chooser.observe(nic, speed + MIB, SECOND));
        let candidates: Vec<_> = (0..speeds.len()).map(near).collect();
        let shares = chooser.shares(&candidates, bytes, pieces);
        prop_assert_eq!(shares.iter().sum::<u32>(), pieces);
    }

    /// Against a plain sum: what is in flight is what is charged and not released, at every moment.
    #[test]
    fn charges_are_released_once(steps in proptest::collection::vec((any::<u64>(), any::<bool>()), 1..300), nics in 1_usize..8) {
        let mut chooser = Chooser::new(nics, Mode::Score);
        let candidates: Vec<_> = (0..nics).map(near).collect();
        let (mut held, mut sums) = (Vec::<Charged>::new(), vec![0_u64; nics]);
        for (number, release) in steps {
            if release && !held.is_empty() {
                let charged = held.swap_remove(usize::try_from(number % held.len() as u64).expect("small"));
                sums[charged.nic] -= charged.bytes;
                chooser.release(charged);
            } else {
                let bytes = number >> 16;
                let (at, charged) = chooser.choose(&candidates, bytes, number).expect("there are some");
                sums[at] += bytes;
                held.push(charged);
            }
            prop_assert_eq!((0..nics).map(|nic| chooser.in_flight(nic)).collect::<Vec<_>>(), sums.clone());
        }
        for charged in held {
            chooser.release(charged);
        }
        prop_assert!((0..nics).all(|nic| chooser.in_flight(nic) == 0));
    }
}

#[test]
fn a_request_is_divided_by_speed_and_in_turn_and_equally_in_baseline_mode() {
    let candidates = [near(0), near(1), near(2)];
    let mut chooser = with_speeds(&[1000, 1000, 1]);
    let mut seen = 0;
    for _ in 0..200 {
        let shares = chooser.divide(&candidates, MIB, 64);
        assert_eq!(shares.iter().sum::<u32>(), 64);
        assert!(shares[0].abs_diff(32) <= 1 && shares[1].abs_diff(32) <= 1, "{shares:?}");
        seen += shares[2];
    }
    assert_eq!(seen, 2, "a piece every 100th time, so that it is seen again");
    let mut chooser = Chooser::new(3, Mode::RoundRobin);
    assert_eq!(chooser.divide(&candidates, MIB, 64), [22, 21, 21]);
    assert_eq!(chooser.divide(&[], MIB, 64), [0; 0]);
    // What is under way over a NIC counts.
    let mut chooser = with_speeds(&[100, 100]);
    let charged = chooser.charge(0, 2 * MIB);
    assert_eq!(chooser.divide(&candidates[..2], MIB, 64), [16, 48]);
    chooser.release(charged);
    assert_eq!(chooser.divide(&candidates[..2], MIB, 64), [32, 32]);
}
