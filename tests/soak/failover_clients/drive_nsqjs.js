// nsqjs: see __init__.py and driving.py.
'use strict'

const {setTimeout: sleep} = require('node:timers/promises')
const nsq = require('nsqjs')

const [lookupd, topic, ...nsqd] = process.argv.slice(2)
const CHANNEL = 'c'
const ANSWER_MS = 2000
const PAUSE_MS = 50
const HEARTBEAT_S = 2
const POLL_S = 1
const IN_FLIGHT = 50

let isOver = false
process.stdin.on('end', () => (isOver = true)).resume()

const inTime = (promise) => Promise.race([promise, sleep(ANSWER_MS, false)])

// nsqjs does not reconnect a writer by itself.
const connectWriter = (address) =>
  new Promise((resolve) => {
    const [host, port] = address.split(':')
    const writer = new nsq.Writer(host, Number(port), {heartbeatInterval: HEARTBEAT_S})
    writer.on('ready', () => resolve(writer))
    writer.on('error', () => resolve(false))
    writer.on('closed', () => resolve(false))
    writer.connect()
  })

const publish = (writer, body) =>
  new Promise((resolve) => writer.publish(topic, body, (error) => resolve(!error)))

async function main() {
  const reader = new nsq.Reader(topic, CHANNEL, {
    lookupdHTTPAddresses: lookupd,
    lookupdPollInterval: POLL_S,
    heartbeatInterval: HEARTBEAT_S,
    maxInFlight: IN_FLIGHT,
  })
  reader.on('message', (message) => {
    console.log(`received ${message.id} ${message.body}`)
    message.finish()
  })
  reader.on('error', () => {})
  reader.connect()
  let number = 0
  for (let next = 0; !isOver; next = (next + 1) % nsqd.length) {
    const writer = await inTime(connectWriter(nsqd[next]))
    if (writer) {
      for (let isGood = true; isGood && !isOver; ) {
        const body = `${topic}-${number++}`
        isGood = await inTime(publish(writer, body))
        if (isGood) console.log(`acknowledged ${body}`)
        await sleep(PAUSE_MS)
      }
      writer.close()
    }
    await sleep(PAUSE_MS)
  }
}

main()
