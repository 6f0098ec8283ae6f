use super::*;

fn gid(text: &str) -> Gid {
    let address: std::net::Ipv6Addr = text.parse().expect("an address");
    Gid(address.octets())
}

fn slot(index: u8, address: &str) -> GidInfo {
    GidInfo {
        index,
        gid: gid(address),
        gid_type: GidType::RoceV2,
        netdev: Netdev::Up("eth0".into()),
        prefix_bits: Some(if gid(address).ipv4().is_some() { 24 } else { 64 }),
    }
}

fn port(device: &str, gids: Vec<GidInfo>) -> PortInfo {
    PortInfo { device: device.into(), port: 1, active: true, state: "ACTIVE".into(), same_numa_node: None, gids }
}

/// B02: a link-local GID at index 0 must not beat the IPv4-mapped one behind it, and the reason says so.
#[test]
fn ipv4_mapped_beats_link_local_at_index_0() {
    let ports = [port("rxe0", vec![slot(0, "fe80::a:b"), slot(1, "::ffff:10.1.2.3")])];
    let choice = choose(&ports, &Wanted::default()).expect("a GID");
    assert_eq!((choice.gid.index, choice.gid.gid), (1, gid("::ffff:10.1.2.3")));
    assert_eq!(
        choice.reason,
        "rxe0 port 1 (the only ACTIVE port), gid_index 1 ::ffff:10.1.2.3 RoCE v2 on eth0 \
         (IPv4-mapped preferred over fe80::a:b at gid_index 0, link-local)"
    );
}

/// B03 (a): without IPv4, a unique local address beats link-local.
#[test]
fn unique_local_beats_link_local() {
    let ports = [port("rxe0", vec![slot(0, "fe80::a:b"), slot(1, "fd00::7")])];
    let choice = choose(&ports, &Wanted::default()).expect("a GID");
    assert_eq!(choice.gid.gid, gid("fd00::7"));
    assert!(choice.reason.contains("routable IPv6 preferred over fe80::a:b"), "{}", choice.reason);
}

#[test]
fn link_local_alone_is_taken() {
    let ports = [port("rxe0", vec![slot(0, "fe80::a:b")])];
    assert_eq!(choose(&ports, &Wanted::default()).expect("a GID").gid.index, 0);
}

#[test]
fn holes_are_never_chosen() {
    let ports = [port("rxe0", vec![slot(0, "::"), slot(1, "::"), slot(2, "fe80::1"), slot(3, "::")])];
    assert_eq!(choose(&ports, &Wanted::default()).expect("a GID").gid.index, 2);
    let wanted = Wanted { gid_index: Some(1), ..Wanted::default() };
    let error = choose(&ports, &wanted).expect_err("an empty slot");
    assert_eq!(error.to_string(), "rxe0 port 1 has no GID at gid_index 1; it has: 2 fe80::1 RoCE v2");
}

#[test]
fn roce_v2_beats_v1_of_the_same_address() {
    let v1 = GidInfo { gid_type: GidType::RoceV1, ..slot(0, "::ffff:10.0.0.1") };
    let ports = [port("mlx5_0", vec![v1, slot(1, "::ffff:10.0.0.1")])];
    let choice = choose(&ports, &Wanted::default()).expect("a GID");
    assert_eq!(choice.gid.index, 1);
    assert!(choice.reason.contains("RoCE v2 preferred over"), "{}", choice.reason);
    let wanted = Wanted { gid_type: Some(GidType::RoceV1), ..Wanted::default() };
    assert_eq!(choose(&ports, &wanted).expect("a GID").gid.index, 0);
}

#[test]
fn an_address_in_another_namespace_loses_even_to_link_local() {
    let elsewhere = GidInfo { netdev: Netdev::Elsewhere, ..slot(1, "::ffff:10.0.0.1") };
    let down = GidInfo { netdev: Netdev::Down("eth1".into()), ..slot(2, "::ffff:10.0.0.2") };
    let ports = [port("mlx5_0", vec![slot(0, "fe80::1"), elsewhere, down])];
    let choice = choose(&ports, &Wanted::default()).expect("a GID");
    assert_eq!(choice.gid.index, 0);
    assert!(choice.reason.contains("its network device is up here"), "{}", choice.reason);
}

#[test]
fn the_peers_subnet_decides_between_equals() {
    let ports = [port("mlx5_0", vec![slot(3, "::ffff:10.0.1.1"), slot(4, "::ffff:10.0.2.1"), slot(5, "fd00::1")])];
    let choice = |peer: &str| {
        let wanted = Wanted { peer: Some(gid(peer)), ..Wanted::default() };
        choose(&ports, &wanted).expect("a GID").gid.index
    };
    assert_eq!(choice("::ffff:10.0.2.77"), 4);
    assert_eq!(choice("::ffff:10.0.1.77"), 3);
    assert_eq!(choice("fd00::99"), 5);
    assert_eq!(choice("2001:db8::99"), 5, "no common subnet: at least the family");
    assert_eq!(choice("::ffff:192.168.0.1"), 3);
}

#[test]
fn an_unknown_prefix_is_no_common_subnet() {
    let unknown = GidInfo { prefix_bits: None, ..slot(0, "::ffff:10.0.0.1") };
    assert!(!same_subnet(&unknown, gid("::ffff:10.0.0.2")));
    let all = GidInfo { prefix_bits: Some(0), ..slot(0, "::ffff:10.0.0.1") };
    assert!(same_subnet(&all, gid("::ffff:200.0.0.2")));
    let host = GidInfo { prefix_bits: Some(32), ..slot(0, "::ffff:10.0.0.1") };
    assert!(!same_subnet(&host, gid("::ffff:10.0.0.2")));
}

#[test]
fn ports_that_are_down_are_passed_over() {
    let down = PortInfo { active: false, state: "DOWN".into(), ..port("mlx5_0", vec![slot(0, "::ffff:10.0.0.1")]) };
    let ports = [down.clone(), port("mlx5_1", vec![slot(0, "::ffff:10.0.0.2")])];
    assert_eq!(choose(&ports, &Wanted::default()).expect("a port").device, "mlx5_1");
    let error = choose(&[down], &Wanted::default()).expect_err("no port");
    assert_eq!(error.to_string(), "mlx5_0 port 1 is DOWN, not ACTIVE: is the link up? see `rdma link`");
}

#[test]
fn numa_node_decides_between_active_ports() {
    let near = PortInfo { same_numa_node: Some(true), ..port("mlx5_1", vec![slot(0, "::ffff:10.0.0.2")]) };
    let far = PortInfo { same_numa_node: Some(false), ..port("mlx5_0", vec![slot(0, "::ffff:10.0.0.1")]) };
    let choice = choose(&[far, near], &Wanted::default()).expect("a port");
    assert_eq!(choice.device, "mlx5_1");
    assert!(choice.reason.contains("NUMA"), "{}", choice.reason);
}

#[test]
fn a_named_gid_finds_its_port_and_its_new_index() {
    let ports = [port("mlx5_0", vec![slot(0, "fe80::1")]), port("mlx5_1", vec![slot(7, "::ffff:10.0.0.2")])];
    let wanted = Wanted { gid: Some(gid("::ffff:10.0.0.2")), ..Wanted::default() };
    let choice = choose(&ports, &wanted).expect("a GID");
    assert_eq!((choice.device.as_str(), choice.gid.index), ("mlx5_1", 7));
    let wanted = Wanted { gid: Some(gid("::ffff:10.0.0.9")), ..Wanted::default() };
    let error = choose(&ports, &wanted).expect_err("not there");
    assert!(matches!(error, ChooseError::GidNotFound { .. }), "{error}");
}

#[test]
fn errors_name_what_there_is() {
    assert_eq!(choose(&[], &Wanted::default()).expect_err("nothing"), ChooseError::NoDevices);
    let ports = [port("rxe0", vec![slot(1, "::ffff:10.0.0.1")]), port("rxe1", vec![])];
    let wanted = Wanted { device: Some("mlx5_9".into()), ..Wanted::default() };
    let error = choose(&ports, &wanted).expect_err("no such device");
    assert_eq!(error.to_string(), "no RDMA device \"mlx5_9\"; there is: rxe0, rxe1");
    let wanted = Wanted { device: Some("rxe0".into()), port: Some(2), ..Wanted::default() };
    assert_eq!(choose(&ports, &wanted).expect_err("no such port").to_string(), "rxe0 has no port 2; it has: 1");
    let wanted = Wanted { device: Some("rxe1".into()), ..Wanted::default() };
    let error = choose(&ports, &wanted).expect_err("no GID");
    assert!(matches!(error, ChooseError::NoGid { .. }), "{error}");
}

#[test]
fn the_first_device_is_the_first_by_name() {
    let of = |name: &str| port(name, vec![slot(0, "::ffff:10.0.0.1")]);
    let ports = [of("mlx5_10"), of("mlx5_2"), of("rxe0")];
    let choice = choose(&ports, &Wanted::default()).expect("a port");
    assert_eq!(choice.device, "mlx5_2");
    assert!(choice.reason.contains("the first fit of 3 ACTIVE ports"), "{}", choice.reason);
}

#[test]
fn a_port_in_the_peers_subnet_beats_the_first() {
    let ports = [
        port("mlx5_0", vec![slot(0, "::ffff:10.0.1.1")]),
        port("mlx5_1", vec![slot(0, "fe80::1"), slot(1, "::ffff:10.0.2.1")]),
    ];
    let wanted = Wanted { peer: Some(gid("::ffff:10.0.2.9")), ..Wanted::default() };
    let choice = choose(&ports, &wanted).expect("a port");
    assert_eq!((choice.device.as_str(), choice.gid.index), ("mlx5_1", 1));
    assert!(choice.reason.contains("in the peer's subnet"), "{}", choice.reason);
}
