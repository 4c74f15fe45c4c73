package tapnet

import (
	"errors"
	"fmt"

	"github.com/vishvananda/netlink"
	"golang.org/x/sys/unix"
)

// Of a rate, in seconds: how far those may be ahead who were silent, and how long packets wait before some are lost. Below the least
// sizes, which are larger than any packet, nothing would pass.
const (
	burstOf, queueOf         = 0.1, 0.2
	leastBurst, leastInQueue = 16 << 10, 32 << 10
)

// fastest is the rate above which there is none: the kernel counts in units of 64 ns.
const fastest = 1 << 40

// setRate has the calling thread's namespace pass so many bytes a second each way, or any number if it is 0. What is too much waits, or
// is lost: programs that drop frames would bring connections to a stop.
func setRate(rate uint64) error {
	nl, err := netlink.NewHandle(unix.NETLINK_ROUTE)
	if err != nil {
		return fmt.Errorf("open netlink: %w", err)
	}
	defer nl.Close()
	for _, name := range []string{tapName, uplinkName} { // what they send
		link, err := nl.LinkByName(name)
		if err == nil {
			err = setQueue(nl, link.Attrs().Index, rate)
		}
		if err != nil {
			return fmt.Errorf("set rate of %s: %w", name, err)
		}
	}
	return nil
}

func setQueue(nl *netlink.Handle, index int, rate uint64) error {
	queue := &netlink.Tbf{
		QdiscAttrs: netlink.QdiscAttrs{LinkIndex: index, Handle: netlink.MakeHandle(1, 0), Parent: netlink.HANDLE_ROOT},
		Rate:       rate,
		Limit:      sized(rate, queueOf, leastInQueue),
	}
	if rate == 0 {
		err := nl.QdiscDel(queue)
		if errors.Is(err, unix.ENOENT) {
			err = nil
		}
		return err
	}
	queue.Buffer = netlink.Xmittime(rate, sized(rate, burstOf, leastBurst))
	err := nl.QdiscReplace(queue)
	if errors.Is(err, unix.ENOENT) {
		return unavailable(err, "a kernel with CONFIG_NET_SCH_TBF is needed for a rate")
	}
	return err
}

// sized is how many bytes a rate is in so many seconds, at least, and at most what a queue can say.
func sized(rate uint64, seconds float64, least uint32) uint32 {
	const most = 1 << 30
	return max(uint32(min(float64(rate)*seconds, most)), least)
}
