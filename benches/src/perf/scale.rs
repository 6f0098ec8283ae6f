//! `scale`: one worker with more and more peers. Each of the client's workers is one peer with one queue pair.

use std::time::Duration;

use super::{
    args::{Scale, Test},
    bandwidth::flood,
    client::{Client, row},
    failure::Failure,
    report::{Cell, Report},
};

pub(crate) fn run(client: &Client, args: &Scale, report: &mut Report) -> Result<(), Failure> {
    let most = client.node.members.len();
    // The first is connected already, by the header.
    let (mut connected, mut connecting) = (1, Duration::ZERO);
    let mut before = None;
    for bytes in args.messages.sizes(Test::Scale.default_bytes()) {
        for peers in steps(most) {
            let made = peers.saturating_sub(connected);
            while connected < peers {
                connecting += client.node.connect(connected, client.server)?;
                connected += 1;
            }
            let members: Vec<usize> = (0..peers).collect();
            let (flood, tally, cpu) = flood(client, &members, bytes, args.messages.extent())?;
            // Against the server with one peer, whose buffers are warm by then.
            let (first_peers, first_kib) = *before.get_or_insert((peers, tally.resident_kib));
            let more = tally.resident_kib.saturating_sub(first_kib);
            let cells = vec![
                Cell::count("bytes", "#bytes", bytes as u64),
                Cell::count("peers", "#peers", peers as u64),
                Cell::count("iterations", "#iterations", flood.sent),
                Cell::real("connect_ms", "connect[msec/peer]", quotient(connecting.as_secs_f64() * 1e3, made), 2),
                Cell::real("bw_average_mib_s", "BW average[MiB/sec]", flood.mib_per_second(bytes), 2),
                Cell::real("msg_rate_mpps", "MsgRate[Mpps]", flood.messages_per_second() / 1e6, 6),
                Cell::real(
                    "server_kib_per_peer",
                    "server memory[KiB/peer]",
                    quotient(f64::from(u32::try_from(more).unwrap_or(u32::MAX)), peers - first_peers.min(peers)),
                    1,
                ),
            ];
            report.rows.push(row(cells, cpu, tally.cpu, flood.sent));
            connecting = Duration::ZERO;
        }
    }
    report
        .notes
        .push("server memory: growth of the process's resident set since the first row, per further peer".to_owned());
    Ok(())
}

/// Of so many; 0 of none.
fn quotient(sum: f64, count: usize) -> f64 {
    u32::try_from(count).map_or(0.0, |count| if count == 0 { 0.0 } else { sum / f64::from(count) })
}

/// Powers of two, and the most.
fn steps(most: usize) -> Vec<usize> {
    let powers = (0..).map(|power| 1 << power).take_while(|&step| step < most);
    powers.chain([most]).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn steps_are_powers_of_two_and_end_at_the_most() {
        assert_eq!(steps(1), [1]);
        assert_eq!(steps(2), [1, 2]);
        assert_eq!(steps(16), [1, 2, 4, 8, 16]);
        assert_eq!(steps(20), [1, 2, 4, 8, 16, 20]);
    }

    #[test]
    fn of_no_peer_there_is_no_share() {
        assert!((quotient(9.0, 3) - 3.0).abs() < 1e-9);
        assert!(quotient(9.0, 0).abs() < 1e-9);
    }
}
