//! Credits of one connection, both directions.
//!
//! A credit is the right to post one SEND, backed by one receive slab at the peer. For each direction, at every
//! instant: unspent + under way + being handled + lent + owed = window.

use super::frame::GrantWish;

/// Smallest window: below it the thresholds of a quarter and a half fall together.
pub const WINDOW_MIN: u16 = 8;

/// Largest window: byte 3 of a frame carries at most 255 credits, and a pure grant must carry a quarter of the window,
/// or more of them could be under way than the reserve has slabs.
pub const WINDOW_MAX: u16 = 4 * u8::MAX as u16;

/// Receive slabs kept for a peer's control frames beyond its window: at most four pure grants (each carries a quarter
/// of the window or more, and grants under way never exceed the window), one PING and one PONG.
pub const CONTROL_RESERVE: u16 = 6;

/// Send credits toward one peer. Invariant: `outstanding <= window`.
#[derive(Debug)]
pub struct TxCredits {
    window: u16,
    outstanding: u16,
}

/// The peer gave back more than was spent, or spent more than it was given: one side lost count.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum CreditError {
    /// A grant above what is outstanding.
    #[error("the peer granted {granted} credits while {outstanding} of {window} were outstanding")]
    ExcessGrant {
        /// What it granted.
        granted: u16,
        /// What was outstanding.
        outstanding: u16,
        /// The window.
        window: u16,
    },
    /// A SEND without a credit.
    #[error("the peer sent beyond its window of {window}")]
    Overspent {
        /// The window.
        window: u16,
    },
}

impl TxCredits {
    /// A fresh window.
    pub const fn new(window: u16) -> Self {
        Self { window, outstanding: 0 }
    }

    /// Takes a credit, or says no when the window is spent: keep the frame and wait for a grant.
    #[must_use]
    pub fn take(&mut self) -> bool {
        let free = self.outstanding < self.window;
        self.outstanding += u16::from(free);
        free
    }

    /// Whether the peer may give back so many.
    #[inline]
    pub const fn may_be_granted(&self, credits: u8) -> bool {
        self.outstanding >= credits as u16
    }

    /// Credits that can be taken now.
    pub const fn available(&self) -> u16 {
        self.window - self.outstanding
    }

    /// The window that the peer granted.
    pub const fn window(&self) -> u16 {
        self.window
    }

    /// Applies a grant from the peer.
    ///
    /// # Errors
    ///
    /// [`CreditError::ExcessGrant`]: close the connection.
    #[inline]
    pub fn on_grant(&mut self, credits: u16) -> Result<(), CreditError> {
        self.outstanding = self.outstanding.checked_sub(credits).ok_or(CreditError::ExcessGrant {
            granted: credits,
            outstanding: self.outstanding,
            window: self.window,
        })?;
        Ok(())
    }

    /// What to ask for in the next SEND's flags: softly at half the window, hard at a quarter.
    pub const fn wish(&self) -> GrantWish {
        let left = self.available();
        if left <= self.window / 4 {
            GrantWish::Hard
        } else if left <= self.window / 2 {
            GrantWish::Soft
        } else {
            GrantWish::None
        }
    }
}

/// Credits that the peer has from us. Invariants: `owed + handling + lent <= window`, `lent <= window / 4`.
#[derive(Debug)]
pub struct RxCredits {
    window: u16,
    /// Arrived, slab not posted again yet.
    handling: u16,
    /// Arrived, slab lent to the application.
    lent: u16,
    /// Slab posted again, credit not given back yet.
    owed: u16,
    wish: GrantWish,
    /// Owed credits from which on a pure grant goes: if the peer asked hard, and if not.
    due: [u16; 2],
}

impl RxCredits {
    /// A fresh window.
    pub const fn new(window: u16) -> Self {
        let due = [Self::pure_grant_min(window), window.div_ceil(2)];
        Self { window, handling: 0, lent: 0, owed: 0, wish: GrantWish::None, due }
    }

    /// A SEND that spends a credit has arrived.
    ///
    /// # Errors
    ///
    /// [`CreditError::Overspent`]: close the connection.
    #[inline]
    pub fn on_receive(&mut self) -> Result<(), CreditError> {
        if !self.has_room() {
            return Err(CreditError::Overspent { window: self.window });
        }
        self.handling += 1;
        Ok(())
    }

    /// Whether the peer may have sent one more.
    #[inline]
    pub const fn has_room(&self) -> bool {
        self.handling + self.lent + self.owed < self.window
    }

    /// The application keeps the slab of a SEND that has arrived, if the peer can spare one: see
    /// [`RxCredits::lent_max`].
    #[must_use]
    pub fn lend(&mut self) -> bool {
        let may = self.handling > 0 && self.lent < Self::lent_max(self.window);
        self.lent += u16::from(may);
        self.handling -= u16::from(may);
        may
    }

    /// The application has given a lent slab back: it is handled like one that has just arrived.
    pub fn on_returned(&mut self) {
        debug_assert!(self.lent > 0, "a slab is lent once and returned once");
        let lent = self.lent.min(1);
        self.lent -= lent;
        self.handling += lent;
    }

    /// Most slabs lent at a time: a quarter of the window. A peer whose window is spent gets the other three quarters
    /// back, which is enough for a pure grant, so an application that keeps what it has never stops its peer.
    pub const fn lent_max(window: u16) -> u16 {
        window / 4
    }

    /// The peer's wish, from the flags of any of its frames. A later, smaller wish does not undo a hard one: only a
    /// grant does.
    #[inline]
    pub fn on_wish(&mut self, wish: GrantWish) {
        self.wish = self.wish.max(wish);
    }

    /// All slabs that arrived and are not lent are posted again: their credits are owed.
    pub fn on_reposted(&mut self) {
        self.owed += std::mem::take(&mut self.handling);
    }

    /// Takes what is owed, at most 255, for byte 3 of the frame that is about to go.
    #[inline]
    pub fn take_grant(&mut self) -> u8 {
        let grant = u8::try_from(self.owed).unwrap_or(u8::MAX);
        self.owed -= u16::from(grant);
        if grant != 0 {
            self.wish = GrantWish::None;
        }
        grant
    }

    /// Fewest credits that a pure grant carries.
    pub const fn pure_grant_min(window: u16) -> u16 {
        window.div_ceil(4)
    }

    /// Whether a pure grant should go when nothing else does: half the window is owed, or a quarter and the peer asked
    /// hard. A smaller debt starves nobody: the peer still holds the rest of its window.
    pub const fn pure_grant_due(&self) -> bool {
        let [asked_hard, in_any_case] = self.due;
        self.owed >= asked_hard && (self.owed >= in_any_case || matches!(self.wish, GrantWish::Hard))
    }

    /// Credits owed now.
    pub const fn owed(&self) -> u16 {
        self.owed
    }

    /// Slabs lent to the application now.
    pub const fn lent(&self) -> u16 {
        self.lent
    }

    /// The window that we granted.
    pub const fn window(&self) -> u16 {
        self.window
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    #[test]
    fn window_spent_blocks_until_grant() {
        let mut tx = TxCredits::new(8);
        for _ in 0..8 {
            assert!(tx.take());
        }
        assert!(!tx.take());
        tx.on_grant(1).unwrap();
        assert!(tx.take());
        assert!(!tx.take());
    }

    #[test]
    fn excess_grant_is_refused_and_changes_nothing() {
        let mut tx = TxCredits::new(8);
        assert!(tx.take());
        assert_eq!(tx.on_grant(2), Err(CreditError::ExcessGrant { granted: 2, outstanding: 1, window: 8 }));
        assert_eq!(tx.available(), 7);
    }

    /// M-57: soft at half, hard at a quarter.
    #[test]
    fn wishes_follow_the_thresholds() {
        let mut tx = TxCredits::new(64);
        for left in (0..64).rev() {
            assert!(tx.take());
            let wish = match left {
                0..=16 => GrantWish::Hard,
                17..=32 => GrantWish::Soft,
                _ => GrantWish::None,
            };
            assert_eq!(tx.wish(), wish, "with {left} left");
        }
    }

    #[test]
    fn overspending_is_noticed() {
        let mut rx = RxCredits::new(8);
        for _ in 0..8 {
            rx.on_receive().unwrap();
        }
        assert_eq!(rx.on_receive(), Err(CreditError::Overspent { window: 8 }));
        rx.on_reposted();
        assert_eq!(rx.on_receive(), Err(CreditError::Overspent { window: 8 }));
        assert_eq!(rx.take_grant(), 8);
        rx.on_receive().unwrap();
    }

    #[test]
    fn a_large_debt_goes_in_several_grants() {
        let mut rx = RxCredits::new(600);
        for _ in 0..600 {
            rx.on_receive().unwrap();
        }
        rx.on_reposted();
        assert_eq!((rx.take_grant(), rx.take_grant(), rx.take_grant(), rx.take_grant()), (255, 255, 90, 0));
    }

    /// The sums of the module's text, and M-58: pure grants under way never exceed four, for every window and order.
    #[derive(Clone, Copy, Debug)]
    enum Op {
        Send,
        Arrive,
        Lend,
        Return,
        Repost,
        Pure,
        GrantArrives,
    }

    fn op() -> impl Strategy<Value = Op> {
        prop_oneof![
            4 => Just(Op::Send),
            4 => Just(Op::Arrive),
            2 => Just(Op::Lend),
            1 => Just(Op::Return),
            1 => Just(Op::Repost),
            2 => Just(Op::Pure),
            2 => Just(Op::GrantArrives),
        ]
    }

    proptest! {
        #[test]
        fn credits_are_conserved_and_pure_grants_are_few(window in WINDOW_MIN..=WINDOW_MAX, ops in prop::collection::vec(op(), 0..3000)) {
            let mut tx = TxCredits::new(window);
            let mut rx = RxCredits::new(window);
            let mut wire = std::collections::VecDeque::new();
            let mut grants = std::collections::VecDeque::new();
            let mut handling = 0;
            let mut lent = 0;
            for op in ops {
                match op {
                    Op::Send => if tx.take() { wire.push_back(tx.wish()); },
                    Op::Arrive => if let Some(wish) = wire.pop_front() {
                        rx.on_receive().unwrap();
                        rx.on_wish(wish);
                        handling += 1;
                    },
                    Op::Lend => if rx.lend() { handling -= 1; lent += 1; },
                    Op::Return => if lent > 0 { rx.on_returned(); handling += 1; lent -= 1; },
                    Op::Repost => { handling = 0; rx.on_reposted(); }
                    Op::Pure => if rx.pure_grant_due() { grants.push_back(rx.take_grant()); },
                    Op::GrantArrives => if let Some(n) = grants.pop_front() { tx.on_grant(u16::from(n)).unwrap(); },
                }
                let under_way: u16 = grants.iter().map(|&g| u16::from(g)).sum();
                let sent = u16::try_from(wire.len()).unwrap();
                prop_assert_eq!(tx.available() + sent + handling + lent + rx.owed() + under_way, window);
                prop_assert!(rx.lent() == lent && lent <= RxCredits::lent_max(window));
                prop_assert!(grants.len() <= 4, "{} pure grants under way", grants.len());
            }
            // Let everything come home but what is lent: a starved sender is always revived.
            for wish in wire { rx.on_receive().unwrap(); rx.on_wish(wish); }
            rx.on_reposted();
            for n in grants { tx.on_grant(u16::from(n)).unwrap(); }
            while rx.pure_grant_due() { let n = rx.take_grant(); tx.on_grant(u16::from(n)).unwrap(); }
            prop_assert!(tx.available() > 0);
        }
    }
}
