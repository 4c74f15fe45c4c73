package acpi

import "encoding/binary"

// Ids that every table carries.
const (
	oemID      = "FORKVM"   // 6 bytes
	oemTableID = "FORKVM01" // 8 bytes
	creatorID  = "FKVM"     // 4 bytes
)

const headerSize = 36

// table is a system description table, section 5.2.6, with a correct checksum.
func table(signature string, revision byte, body []byte) []byte {
	t := make([]byte, 0, headerSize+len(body))
	t = append(t, signature...)
	t = binary.LittleEndian.AppendUint32(t, uint32(headerSize+len(body)))
	t = append(t, revision, 0)
	t = append(t, oemID...)
	t = append(t, oemTableID...)
	t = binary.LittleEndian.AppendUint32(t, 1) // OEM revision
	t = append(t, creatorID...)
	t = binary.LittleEndian.AppendUint32(t, 1) // creator revision
	t = append(t, body...)
	t[9] = checksum(t)
	return t
}

// checksum is the byte that makes the sum of all bytes zero.
func checksum(b []byte) byte {
	sum := byte(0)
	for _, v := range b {
		sum += v
	}
	return -sum
}

const rsdpSize = 36

// rootPointer is the RSDP, section 5.2.5.3. The first checksum covers the 20
// bytes that ACPI 1.0 had.
func rootPointer(xsdt uint64) []byte {
	p := make([]byte, rsdpSize)
	copy(p[0:], "RSD PTR ")
	copy(p[9:], oemID)
	p[15] = 2 // revision
	binary.LittleEndian.PutUint32(p[20:], rsdpSize)
	binary.LittleEndian.PutUint64(p[24:], xsdt)
	p[8] = checksum(p[:20])
	p[32] = checksum(p)
	return p
}

// rootTable is the XSDT, section 5.2.8.
func rootTable(tables ...uint64) []byte {
	var body []byte
	for _, address := range tables {
		body = binary.LittleEndian.AppendUint64(body, address)
	}
	return table("XSDT", 1, body)
}

// FADT feature flags, section 5.2.9, table 5.10.
const (
	flagWBINVD          = 1 << 0
	flagNoPowerButton   = 1 << 4
	flagNoSleepButton   = 1 << 5
	flagResetRegister   = 1 << 10
	flagHardwareReduced = 1 << 20
)

// Boot architecture flags, section 5.2.9.3. The bits for legacy devices and for
// a keyboard controller stay clear, so that a kernel does not look for them.
const (
	bootNoVGA           = 1 << 2
	bootNoRealTimeClock = 1 << 5
)

// Sleep states that are not supported have latencies (µs) above these limits.
const (
	latencyC2 = 100 + 1
	latencyC3 = 1000 + 1
)

// Offsets of the FADT's fields.
const (
	offsetDSDT         = 40
	offsetLatencyC2    = 96
	offsetLatencyC3    = 98
	offsetBootFlags    = 109
	offsetFlags        = 112
	offsetReset        = 116
	offsetResetValue   = 128
	offsetMinor        = 131
	offsetXDSDT        = 140
	offsetSleepControl = 244
	offsetSleepStatus  = 256
	offsetHypervisor   = 268
	fadtSize           = 276
)

// fixedTable is the FADT of ACPI 6.5, section 5.2.9.
func fixedTable(dsdt uint64, p Power) []byte {
	const major, minor = 6, 5
	t := make([]byte, fadtSize)
	flags := uint32(flagWBINVD | flagNoPowerButton | flagNoSleepButton | flagHardwareReduced)
	binary.LittleEndian.PutUint32(t[offsetDSDT:], uint32(dsdt))
	binary.LittleEndian.PutUint16(t[offsetLatencyC2:], latencyC2)
	binary.LittleEndian.PutUint16(t[offsetLatencyC3:], latencyC3)
	binary.LittleEndian.PutUint16(t[offsetBootFlags:], bootNoVGA|bootNoRealTimeClock)
	if p.Reset != 0 {
		flags |= flagResetRegister
		copy(t[offsetReset:], port(p.Reset))
		t[offsetResetValue] = p.ResetValue
	}
	binary.LittleEndian.PutUint32(t[offsetFlags:], flags)
	t[offsetMinor] = minor
	binary.LittleEndian.PutUint64(t[offsetXDSDT:], dsdt)
	if p.SleepControl != 0 {
		copy(t[offsetSleepControl:], port(p.SleepControl))
		copy(t[offsetSleepStatus:], port(p.SleepStatus))
	}
	copy(t[offsetHypervisor:], "FORKVM\x00\x00")
	return table("FACP", major, t[headerSize:])
}

// port is the generic address of a byte-wide I/O port, section 5.2.3.2.
func port(number uint16) []byte {
	const systemIO, accessByte = 1, 1
	return binary.LittleEndian.AppendUint64([]byte{systemIO, 8, 0, accessByte}, uint64(number))
}

// interruptTable is the MADT, section 5.2.12. Its flags say that there is no pair
// of 8259 controllers beside the APICs.
func interruptTable(cpus int) []byte {
	const enabled, noLegacy = 1, 0
	body := binary.LittleEndian.AppendUint32(nil, LocalAPICAddress)
	body = binary.LittleEndian.AppendUint32(body, noLegacy)
	for n := range cpus {
		body = append(body, 0, 8, byte(n), byte(n)) // local APIC: unique id, APIC id
		body = binary.LittleEndian.AppendUint32(body, enabled)
	}
	body = append(body, 1, 12, 0, 0) // I/O APIC: id 0
	body = binary.LittleEndian.AppendUint32(body, IOAPICAddress)
	body = binary.LittleEndian.AppendUint32(body, 0) // its first GSI
	return table("APIC", 5, body)
}

// dsdtRevision: from 2 on integers have 64 bits.
const dsdtRevision = 2

func differentiatedTable(c Config) []byte { return table("DSDT", dsdtRevision, definitions(c)) }
