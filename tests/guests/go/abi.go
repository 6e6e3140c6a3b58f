// The contract pilothouse:plugin@0.1.0 by hand, as the canonical ABI has it: texts and lists are an address and a length, and what is
// larger than one number comes back at an address. Each call has an instance of its own, so nothing is ever given back.
package main

import (
	"runtime/debug"
	"unsafe"
)

// Desired is as much of the contract's `desired` as this plugin answers with.
type Desired struct {
	// Objects as JSON.
	Children []string
}

func init() {
	// Arguments are allocated while nothing may be imported, and the garbage collector asks for the time.
	debug.SetGCPercent(-1)
}

var (
	kept          [][]byte
	adapterMemory [256 << 10]byte
	adapterUsed   uint32
)

// Where the host puts arguments.
//
//go:wasmexport cabi_realloc
func cabiRealloc(_, _, align, size uint32) uint32 {
	block := make([]byte, size+align)
	kept = append(kept, block)
	return alignUp(address(unsafe.Pointer(unsafe.SliceData(block))), align)
}

// Where the adapter between the two previews of WASI keeps its state. It asks while Go's runtime is only starting, so nothing of Go
// may be used here: no stack, no heap.
//
//go:wasmexport cabi_realloc_adapter
//go:nosplit
func cabiReallocAdapter(_, _, align, size uint32) uint32 {
	begin := uint32(uintptr(unsafe.Pointer(&adapterMemory)))
	at := (begin + adapterUsed + align - 1) &^ (align - 1)
	adapterUsed = at + size - begin
	if adapterUsed > uint32(len(adapterMemory)) {
		*(*uint32)(nil) = 0
	}
	return at
}

func address(pointer unsafe.Pointer) uint32 { return uint32(uintptr(pointer)) }

func alignUp(at, align uint32) uint32 { return (at + align - 1) &^ (align - 1) }

func text(at, length uint32) string {
	return unsafe.String((*byte)(unsafe.Pointer(uintptr(at))), length)
}

func addressOf(text string) (uint32, uint32) {
	bytes := []byte(text)
	kept = append(kept, bytes)
	return address(unsafe.Pointer(unsafe.SliceData(bytes))), uint32(len(bytes))
}

var answer [14]uint32

//go:wasmexport pilothouse:plugin/reconciler@0.1.0#describe
func exportDescribe() uint32 {
	answer[0], answer[1] = addressOf(description)
	return address(unsafe.Pointer(&answer))
}

//go:wasmexport pilothouse:plugin/reconciler@0.1.0#reconcile
func exportReconcile(parent, parentLength, children, childrenLength, _, _, _, _, _, _ uint32) uint32 {
	list := unsafe.Slice((*[2]uint32)(unsafe.Pointer(uintptr(children))), childrenLength)
	objects := make([]string, len(list))
	for i, object := range list {
		objects[i] = text(object[0], object[1])
	}
	desired, err := reconcile(text(parent, parentLength), objects)
	if err != nil {
		// result: its second case, then the first case of failure, and its text.
		answer[0], answer[1] = 1, 0
		answer[2], answer[3] = addressOf(err.Error())
		return address(unsafe.Pointer(&answer))
	}
	wanted := make([][4]uint32, len(desired.Children))
	for i, object := range desired.Children {
		wanted[i][0], wanted[i][1] = addressOf(object)
		wanted[i][2], wanted[i][3] = addressOf("{}")
	}
	// result: its first case, then the fields of desired: children, status, conditions, events, next and extra.
	answer = [14]uint32{1: address(unsafe.Pointer(unsafe.SliceData(wanted))), 2: uint32(len(wanted))}
	answer[12], answer[13] = addressOf("{}")
	return address(unsafe.Pointer(&answer))
}
