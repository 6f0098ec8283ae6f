//! The rules of posting, completing and receiving.

use super::pair::*;
use crate::fabric::{Fabric, FabricQp, Wc, WrSeq};

#[tokio::test(start_paused = true)]
async fn messages_arrive_in_order_and_a_signaled_wc_covers_those_before() {
    let mut pair = Pair::new().await;
    for byte in 0..4u8 {
        pair.send(&[byte; 5], byte == 3).unwrap();
    }
    assert_eq!(pair.b.messages(), (0..4u8).map(|byte| vec![byte; 5]).collect::<Vec<_>>());
    assert_eq!(pair.a.poll(), [Wc::Send { qpn: pair.qp_a.qpn().get(), seq: WrSeq(3) }]);
    assert_eq!(pair.world.report().hosts[0].outstanding_wrs, 0);
}
